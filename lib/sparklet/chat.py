"""The chat format: the one Ling 3 uses, as far as it is public, in Python and as a Jinja template.

A conversation is `<role>SYSTEM</role>...detailed thinking on<|role_end|><role>HUMAN</role>...`, an
assistant turn `<role>ASSISTANT</role>\\n<think>...</think>...<|role_end|>`, with `<think></think>`
when thinking is off. Reasoning of turns before the last question is dropped. Tool calls are
`<tool_call>name\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>`. The system turn lists
the offered tools as `name(parameter, parameter)`, which is Sparklet's own, shorter form.
"""

from __future__ import annotations

from typing import Any

from .words import TOOLS

END = "<|role_end|>"
PAD = "<|endoftext|>"
HIDDEN = (PAD, END, "<|startoftext|>", "<role>", "</role>")  # removed from decoded text
SHOWN = (  # kept in decoded text: SGLang's ling3 parsers look for them there
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

TEMPLATE = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
<role>SYSTEM</role>
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif -%}
{%- if tools %}{{ '<tools>\\n' }}
{%- for tool in tools %}
{%- set f = tool.function if tool.function is defined else tool -%}
{%- set p = f.parameters.properties if f.parameters and f.parameters.properties else {} -%}
{{ f.name + '(' + (p.keys() | list | join(', ')) + ')\\n' }}
{%- endfor %}{{ '</tools>\\n' }}{% endif -%}
detailed thinking {{ 'on' if enable_thinking else 'off' }}<|role_end|>
{%- for m in messages -%}
{%- if m.role == 'user' -%}
<role>HUMAN</role>{{ m.content }}<|role_end|>
{%- elif m.role == 'system' and not loop.first -%}
<role>SYSTEM</role>{{ m.content }}<|role_end|>
{%- elif m.role == 'tool' -%}
<role>OBSERVATION</role>{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}<|role_end|>
{%- elif m.role == 'assistant' -%}
{%- set content = m.content or '' -%}
{%- set reasoning = m.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
<role>ASSISTANT</role>{{ '\\n<think>' + (reasoning if loop.index0 > ns.last else '') + '</think>' + content }}
{%- for call in m.tool_calls or [] -%}
{%- set f = call.function if call.function is defined else call -%}
<tool_call>{{ f.name + '\\n' }}
{%- for k, v in f.arguments.items() -%}
<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>{{ v if v is string else v | tojson }}</arg_value>{{ '\\n' }}
{%- endfor -%}
</tool_call>
{%- endfor -%}
<|role_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<role>ASSISTANT</role>{{ '\\n<think>' if enable_thinking else '\\n<think></think>' }}
{%- endif -%}
"""


def tool_schema(name: str) -> dict[str, Any]:
    """The OpenAI form of one of Sparklet's tools."""
    numeric = ("minutes", "amount")
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": name.replace("_", " "),
            "parameters": {
                "type": "object",
                "properties": {
                    p: {"type": "integer" if p in numeric else "string"} for p in TOOLS[name]
                },
                "required": list(TOOLS[name]),
            },
        },
    }


def _call(call: dict[str, Any]) -> str:
    f = call["function"]
    body = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in f["arguments"].items()
    )
    return f"<tool_call>{f['name']}\n{body}</tool_call>"


def prompt(
    messages: list[dict[str, Any]],
    *,
    thinking: bool,
    tools: list[str] | None = None,
    system: str | None = None,
    generate: bool = True,
) -> str:
    """The conversation as text, up to where the assistant begins."""
    return "".join(
        t for t, _ in pieces(messages, thinking=thinking, tools=tools, system=system)
    ) + (_opening(thinking) if generate else "")


def _opening(thinking: bool) -> str:
    return "<role>ASSISTANT</role>\n<think>" + ("" if thinking else "</think>")


def pieces(
    messages: list[dict[str, Any]],
    *,
    thinking: bool,
    tools: list[str] | None = None,
    system: str | None = None,
) -> list[tuple[str, bool]]:
    """(text, whether the assistant wrote it) in order; joined they are the rendered template."""
    head = "<role>SYSTEM</role>" + (f"{system}\n" if system else "")
    if tools:
        lines = "".join(f"{t}({', '.join(TOOLS[t])})\n" for t in tools)
        head += f"<tools>\n{lines}</tools>\n"
    out = [(f"{head}detailed thinking {'on' if thinking else 'off'}{END}", False)]
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, m in enumerate(messages):
        if m["role"] == "user":
            out.append((f"<role>HUMAN</role>{m['content']}{END}", False))
        elif m["role"] == "tool":
            text = f"\n<tool_response>\n{m['content']}\n</tool_response>"
            out.append((f"<role>OBSERVATION</role>{text}{END}", False))
        else:
            own = m["content"] + "".join(_call(c) for c in m.get("tool_calls", ())) + END
            if thinking and i > last:
                out.append((_opening(True), False))
                out.append((f"{m.get('reasoning_content', '')}</think>{own}", True))
            else:
                out.append((_opening(False), False))
                out.append((own, True))
    merged: list[tuple[str, bool]] = []
    for text, mine in out:
        if merged and merged[-1][1] == mine:
            merged[-1] = (merged[-1][0] + text, mine)
        else:
            merged.append((text, mine))
    return merged
