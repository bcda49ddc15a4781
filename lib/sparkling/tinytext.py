"""What the constructed tiny Ling says: its words, its chains of words, its chat template.

The tiny model is a next-token map with a memory of a few facts. This module holds the map; `tiny`
turns it into weights. A chain is written as one string: words are separated by blanks, `a|b` are
alternatives (the first is the most likely and thus the greedy one), and a leading blank before a
word belongs to its token, except for the first word of a chain.
"""

from __future__ import annotations

# Ling's own special tokens. Those of the second group are shown in the decoded text, because
# SGLang's `ling3` parsers look for them there.
HIDDEN = ("<|endoftext|>", "<role>", "</role>", "<|role_end|>")
SHOWN = (
    "<think>",
    "</think>",
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)
END = "<|role_end|>"
PAD = "<|endoftext|>"

CITIES = ("Hangzhou", "Beijing", "Shanghai", "Paris", "London", "Berlin", "Tokyo", "Nairobi")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")

# Words in a prompt that change the subject of the answer.
TOPICS = {
    "code": ("code", "Python", "python", "function", "program"),
    "count": ("count", "Count", "numbers", "list", "List", "Copy", "copy", "repeat"),
}

REASONING = (
    "The question looks simple:|short:|plain: I recall|collect two facts, put those in|into order "
    "and reply briefly.|politely. First comes whatever is known,|certain, then an example,|instance, "
    "finally a caveat.|warning."
)
STORY = (
    "A small|tiny draft model guesses|drafts|proposes several|three words ahead while its "
    "large|big partner checks|verifies them all at once. Every|Each guess that survives makes "
    "decoding faster,|cheaper, so answers arrive sooner|earlier without changing what they say. "
    "Whenever one misses,|fails, everything behind it gets thrown away:|out: nothing wrong|bad ever "
    "reaches you. Long texts with familiar|common phrases profit|gain most; surprising|unusual prose "
    "benefits|wins less."
)
CODE = (
    "```python\n",
    "def",
    " propose",
    "(prefix):\n",
    "    guesses",
    " = []\n",
    "    for",
    " step",
    " in range(3):\n",
    "        guesses.append(",
    "next_token(",
    "prefix + guesses))\n",
    "    return",
    " guesses\n",
    "```",
)
COUNT = " ".join(f"{i}," for i in range(1, 20)) + " 20."
# {city} and {sky} are filled from what the model reads in the conversation.
WEATHER = "Today {city} will stay {sky} according to your tool."

# Everyday words that stand in prompts, so that they are tokens rather than bytes.
_COMMON = (
    "a about after all also an and answer any are as ask at be because been but by can could day "
    "describe do does each explain fast few find for from get give good has have help here how if "
    "in into is it its know large let like long make many may me memory model more most much my "
    "need new no not now of on one only or other our out over please question rather read say see "
    "sentence server she short should show simple slow small so some speed step still tell text "
    "than that the their them then there these they this time to token tokens two under up use "
    "very was we weather well were what when where which who why will with word words would write "
    "you your"
)
COMMON = tuple(_COMMON.split())

CHAT_TEMPLATE = """\
{#- Ling's turn format. Thinking is on unless the caller says enable_thinking=false. -#}
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none and content is iterable -%}
    {%- for part in content -%}{{ part['text'] if part['type'] == 'text' else '' }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- '<role>SYSTEM</role>' -}}
{%- if messages and messages[0]['role'] == 'system' -%}
  {{- text(messages[0]['content']) + '\\n' -}}
{%- endif -%}
{%- if tools -%}
  {{- '<tools>' -}}
  {%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
  {{- '\\n</tools>\\n' -}}
{%- endif -%}
{{- 'detailed thinking ' + ('on' if enable_thinking else 'off') + '<|role_end|>' -}}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {{- '<role>HUMAN</role>' + text(message['content']) + '<|role_end|>' -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<role>ASSISTANT</role><think></think>' + text(message['content']) -}}
    {%- for call in message['tool_calls'] or [] -%}
      {%- set function = call['function'] -%}
      {{- '<tool_call>' + function['name'] -}}
      {%- for key, value in function['arguments'].items() -%}
        {{- '<arg_key>' + key + '</arg_key><arg_value>' -}}
        {{- value if value is string else value | tojson -}}
        {{- '</arg_value>' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
    {{- '<|role_end|>' -}}
  {%- elif message['role'] == 'tool' -%}
    {#- Only results that are newer than the last question still await an answer. -#}
    {%- set fresh = loop.index0 > ns.last_user -%}
    {{- '<role>OBSERVATION</role>' + ('<tool_response>' if fresh else '') -}}
    {{- text(message['content']) -}}
    {{- ('</tool_response>' if fresh else '') + '<|role_end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<role>ASSISTANT</role><think>' + ('' if enable_thinking else '</think>') -}}
{%- endif -%}
"""


def chain(text: str) -> list[tuple[str, ...]]:
    """The slots of a chain: for each place the tokens that may stand there, likeliest first."""
    slots = []
    for number, slot in enumerate(text.split(" ")):
        blank = "" if number == 0 else " "
        slots.append(tuple(blank + word for word in slot.split("|")))
    return slots
