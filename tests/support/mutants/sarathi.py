"""Wrong versions of what Sarathi-Serve describes."""

from __future__ import annotations

from mutants.running import rewritten, wrong

SARATHI = "firsttoken.engine.schedulers.sarathi:Sarathi"
CHUNKS = "firsttoken.engine.schedulers.scheduler:Scheduler.chunks"
CAPACITY, WITHIN = "firsttoken.sarathi.capacity:capacity", "firsttoken.sarathi.capacity:ClientTimes.within"
SCHEDULER, SEARCH = "Sarathi-Serve's scheduler", "the search of the cell `mechanism`"


CELL = "the scheduler of the cell `mechanism`"
rewritten(
    "02", "decodes wait while a prompt is read", "if not tokens}  # every", "if not any(remaining.values())}  #", CELL
)
rewritten("02", "a prompt is read whole in the cell", "min(tokens, room)", "tokens", CELL, quick=True)
rewritten("40", "chunks before decodes in the cell", "decodes + self.chunks(", "self.chunks(", CELL)
rewritten("40", "decodes outside the budget of the cell", " - len(decodes)  #", "  #", CELL)
rewritten(
    "40",
    "a rival that puts decodes first",
    "self.prefills() or self.decodes()",
    "self.decodes() or self.prefills()",
    CELL,
)
rewritten("40", "a rival in turns", "self.prefills() or self.decodes()  #", "self.decodes() + self.prefills()  #", CELL)


rewritten("41", "the P90 in the cell", "np.percentile(gaps, 99)", "np.percentile(gaps, 90)", SEARCH)
rewritten("41", "no bound on the delay in the cell", " and np.median(delays) <= delay_s)", ")", SEARCH)
rewritten("41", "a coarse search in the cell", "share=0.02", "share=0.5", SEARCH)
rewritten("41", "the rate that broke in the cell", "return low, tried", "return high, tried", SEARCH, quick=True)


WAVES = "the waves of the cell `mechanism`"
rewritten("42", "a wave too many in the cell", "* heads / processors)\n", "* heads / processors + 1)\n", WAVES)
rewritten("42", "no prefix in the cell", "(prefix + chunk / 2)", "(chunk / 2)", WAVES)
rewritten("42", "a tile of all queries in the cell", "math.ceil(chunk / tile) * heads", "heads", WAVES, quick=True)


PARTS = "the step of the cell `mechanism`"
rewritten(
    "43", "weights read twice in the cell", "decode_ms(decodes) - prefill_ms(decodes)", "decode_ms(decodes)", PARTS
)
rewritten("43", "decodes for nothing in the cell", " + beyond + behind", " + behind", PARTS, quick=True)
rewritten("43", "no prefix in the cell", "        if before:", "        if not before:", PARTS)


SUM = "the sum of the cell `mechanism`"
rewritten("46", "one all-reduce a layer in the cell", "layer += 2 * along(", "layer += along(", SUM)
rewritten("46", "no prefix in the cell", "end - begin if cached else end", "end", SUM)
rewritten("46", "a product left out in the cell", "(hidden, q), ", "", SUM)


@wrong("02", "the youngest prompt first", CHUNKS, CELL)
def youngest_prompt_first(right, scheduler, tokens, *, admit):
    scheduler.waiting.reverse()
    try:
        return right(scheduler, tokens, admit=admit)
    finally:
        scheduler.waiting.reverse()


@wrong("02", "prefill first", f"{SARATHI}.schedule", CELL)
@wrong("40", "prefill first", f"{SARATHI}.schedule", CELL, quick=True)
@wrong("41", "prefill first", f"{SARATHI}.schedule", SCHEDULER)
def prefill_first(right, scheduler):
    return scheduler.prefills(admit=not scheduler.swapped) or scheduler.ready()[0]


@wrong("02", "no token budget", f"{SARATHI}.budget", CELL)
@wrong("40", "no token budget", f"{SARATHI}.budget", CELL)
def no_budget(right, scheduler, decodes):
    return 1 << 30


@wrong("02", "prompts are never cut", CHUNKS, CELL)
@wrong("40", "prompts are never cut", CHUNKS, CELL)
def whole_chunks(right, scheduler, tokens, *, admit):
    """A prompt takes the whole of what is left in a step, however much the budget leaves."""
    return scheduler.prefills(admit=admit)


@wrong("40", "chunks and decodes in turns", f"{SARATHI}.schedule", CELL)
def chunks_and_decodes_in_turns(right, scheduler):
    return scheduler.chunks(scheduler.config.token_budget, admit=True) or scheduler.ready()[0]


@wrong("40", "nothing is scheduled", f"{SARATHI}.schedule", CELL)
def nothing_scheduled(right, scheduler):
    return []


@wrong("40", "no answer", f"{SARATHI}.schedule", CELL)
def no_answer(right, scheduler):
    return None


@wrong("40", "decodes outside the budget", f"{SARATHI}.schedule", CELL)
def decodes_outside_the_budget(right, scheduler):
    chunks = scheduler.ready()[0]
    return chunks + scheduler.chunks(scheduler.config.token_budget, admit=not scheduler.swapped)


@wrong("41", "the search only doubles", CAPACITY, SEARCH, quick=True)
def only_doubled(right, serve, objective, *, start, share=0.02):
    """The search ends at the first rate that broke the objective."""
    rate, served = start, serve(start)
    while served.within(objective):
        rate, served = 2 * rate, serve(2 * rate)
    return rate / 2, served


@wrong("41", "the rate that broke", CAPACITY, SEARCH)
def the_rate_that_broke(right, serve, objective, *, start):
    return 1.02 * right(serve, objective, start=start)[0], None


@wrong("41", "no bound on the delay", WITHIN, SEARCH)
def no_bound_on_the_delay(right, times, objective):
    return times.tbt_p99_s <= objective.tbt_s


@wrong("41", "no bound on the gaps", WITHIN, SEARCH)
def no_bound_on_the_gaps(right, times, objective):
    return times.delay_p50_s <= objective.delay_s


@wrong("41", "no capacity", CAPACITY, SEARCH)
def no_capacity(right, serve, objective, *, start):
    return None
