"""The small world of Sparklet's texts: names, things, places, tools."""

from __future__ import annotations

HE = (
    "Ben Carlos Dan Emil Finn Gus Hugo Ivan Jonas Karim Leo Max Nils Omar Paul Ravi Sam Tom Victor "
    "Will Yusuf Ali Bruno Chen"
).split()
SHE = (
    "Ana Bella Cleo Dora Eva Fatima Grace Hana Ines June Kai Lena Mia Nora Olga Pia Quin Rosa Sara "
    "Tara Uma Vera Wendy Zoe"
).split()

THINGS = (
    "apples books coins cards shells pens stamps plums beads nuts keys cups eggs roses marbles "
    "stickers cookies pencils buttons balloons tickets candles lemons oranges peaches rocks toys "
    "tiles bricks plates spoons socks hats kites maps magnets ribbons cakes muffins carrots "
    "potatoes onions tomatoes bananas photos posters crayons chairs lamps bottles flowers seeds "
    "leaves fish stones shirts"
).split()
HOLDERS = "bags boxes baskets jars packs trays crates shelves bowls bins".split()
HOLDER_ONE = "bag box basket jar pack tray crate shelf bowl bin".split()
PLACES = (
    "market shop park school library garden station harbor museum farm office beach kitchen attic"
).split()
PETS = "dogs cats birds rabbits ponies goats".split()
COLORS = "red blue green yellow white black brown silver golden purple".split()
ANIMALS = "fox owl bear mouse turtle heron rabbit otter wolf hedgehog".split()
CITIES = (
    "Oslo Paris Tokyo Cairo Lima Delhi Berlin Rome Madrid Dublin Quito Seoul Hanoi Hangzhou Beijing "
    "London"
).split()
MONEY = "dollars euros yen pounds".split()
SKIES = "sunny cloudy rainy windy snowy foggy".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()

# name -> parameters; the tool set Sparklet knows
TOOLS = {
    "get_weather": ("city",),
    "set_timer": ("minutes",),
    "convert_money": ("amount", "source", "target"),
    "find_shop": ("item", "city"),
    "send_message": ("name", "text"),
}
