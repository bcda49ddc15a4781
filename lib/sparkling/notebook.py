"""What a notebook holds in its hand: one `Session`, so that every cell stays one short sentence.

How a notebook reads (this is `50_humming`, whole; the same source runs on every lane)::

    # parameters                                   <- the one cell tagged `parameters`
    lane = "auto"                                  # spark, gpu, cpu, or auto
    run_id = ""                                    # empty: a new run

    from sparkling import notebook
    nb = notebook.begin("50_humming", lane=lane, run_id=run_id)
    nb.opening                                     # the card: have, minutes, risks, undo

    nb.check()                                     # needs, each with a tick or a cross and a remedy
    nb.diff("humming")                             # the one change against the stage before
    nb.command("humming")                          # the whole command, as it will be run
    nb.start("humming")                            # starts SGLang; ready = a real token came back
    nb.prove()                                     # live or not; stops the notebook if not
    nb.measure()                                   # this arm, the same prompts as every other arm
    nb.stop()
    nb.closing                                     # what was proved here, and what comes next

Every call returns an object that shows itself (HTML in Jupyter and on GitHub, text in a terminal),
so a cell ends with the call and nothing is printed by hand.

Where a lane cannot run a stage, `start` starts nothing and says why in one line, `prove` shows the
evidence wanted beside a recording that is labelled as one, and `measure` says that nothing was
measured. None of them raises, so the cells need no `if`.

More, for the notebooks that want it::

    nb.lane, nb.recipe, nb.run                     # the plain objects underneath
    nb.server, nb.client                           # the running server (None before start) and a Client
    nb.launch("nextn")                             # the Launch itself, unchanged by this module
    nb.unavailable("humming")                      # None, or the reason as one sentence
    nb.wanted("nextn")                             # the evidence a stage will be asked for
    nb.compare("humming")                          # alias of diff, against=... for another stage
    nb.ask("What is 17 x 23?", max_tokens=200)     # one streamed request, shown with its timings
    nb.measure(["long-answer"], repeats=5)         # chosen workloads, chosen repeats
    nb.ladder()                                    # every arm of this run as one picture
    nb.recording("h200-humming")                   # one recording, plainly labelled
    nb.endpoint()                                  # how to call the running server from elsewhere

The text of the two cards is data: `notebooks/cards.toml`, one table per notebook (see `card`).
"""

from __future__ import annotations
