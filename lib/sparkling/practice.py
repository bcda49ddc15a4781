"""Prompts in the language of Sparklet, the practice model, for recipes that say `texts = "practice"`.

Sparklet knows about 800 words and was trained on generated texts only (models/sparklet/README.md);
prompts from the world at large would reach it as single bytes. The problems were drawn once from
its generator's measurement half (`sparklet.tasks`, "held out"), so it was trained on none of them.
"""

SHORT = [
    "Emil has 99 bananas. They are shared equally by 9 friends. How many bananas does each of them "
    "get?",
    "Nora starts with 65 maps. Zoe owns 15 more than Nora. What is the number of maps that Zoe owns?",
    "Carlos writes 4 lines a day. How many lines are done after 6 days?",
    "Bella owns 215 golden hats. She loses 18 hats on the way to the library. The harbor opens at "
    "33. How many hats are left with Bella?",
    "Tara starts with 14 onions. She keeps one half of them. How many onions does Tara have in the "
    "end?",
    "There are 44 tickets in Uma's bin. Hugo has four times as many tickets as Uma. The harbor is "
    "11 years old. How many tickets does Hugo have?",
    "Karim is 37 years old. Pia is older than Karim by 8 years. How old is Pia now?",
    "Cleo packs 9 muffins into each of 14 bowls. There are also 7 photos in the beach. How many "
    "muffins is that?",
    "At the farm Jonas pays 4 dollars for each of 10 seeds. He pays with 50 dollars. How many "
    "dollars does Jonas get back?",
    "On Friday Nora counts 42 cards, and on Monday 22. The day after it is 26. What is the sum?",
    "Vera eats 10 books every day. How many books is that in 7 weeks?",
    "Lena has 18 cups and Chen has 12. They are shared equally by 3 friends. How many cups go to "
    "each of them?",
]

LONG = [
    "Dora collected 34 posters at the library. Pia gives Dora 29 more posters. Then she finds 33 "
    "posters in the museum. Later she leaves 22 posters at the library. What is the number of "
    "posters that Dora has now?",
    "Write a long story about a hedgehog.",
    "Wendy fills 7 shelves with 3 cups each. Omar is 6 years old. There are 9 silver shelves with 15 "
    "cups each. How many cups is that together?",
    "Tell me a story about Nora.",
    "Sam collected 36 tickets at the school. Later he picks up another 38 tickets. He loses 3 "
    "tickets on the way to the shop. He receives 79 tickets from Wendy. How many tickets does Sam "
    "have in the end?",
    "Write a long story about a heron.",
    "The harbor has 11 rows with 46 seats each. Tom sells tickets for 214 seats. How many seats are "
    "free?",
    "Tell me a story about an otter.",
    "Will has 68 photos, but 26 of them are broken. Each pack can hold 6 photos. How many packs are "
    "needed for the rest?",
    "Write a short story about Victor.",
    "Wendy owns 14 blue shells. On Saturday she gets 37 more. Then she sells 28 of the shells. Nils "
    "has 33 cats. How many shells does Wendy have in the end?",
    "Write a long story about a wolf.",
]

REPEAT = "Repeat this again and again: {text}"
PASSAGES = [
    "The blue pack holds 28 crayons.",
    "kitchen, hedgehog, museum, shells",
    "A white bear runs through the park.",
    "green harbor fish buttons",
    "Every Wednesday the shop is full of apples. Fatima puts the lemons on the red table.",
    "buttons, bananas, magnets, attic.",
    "A silver hedgehog runs through the garden.",
    "candles fox green brown kitchen Thursday.",
    "The golden tray holds 48 cups. Gus puts the crayons on the golden table.",
    "tickets marbles",
    "The green crate holds 46 crayons.",
    "kitchen Friday harbor owl",
]
