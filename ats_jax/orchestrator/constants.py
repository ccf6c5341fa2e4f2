"""The constants of the orchestrator, each with its reason; those of the step are in `step.reflex`.

The [suite of faults](docs/lab/faults.md) is run again before one of them changes.
"""

# Noise of the held-out loss. A domain is worse if it is above its best by more than the margin.
HISTORY = 12  # looks whose losses tell the noise: enough for a median, short against a run
LEAST_MARGIN = 0.02  # nats; a look moves a healthy loss by less once the first descent is over
FIRST_MARGIN = 0.1  # nats, until three bends of the curve are known
MARGIN_BENDS = 3.0  # times the median bend (second difference), which a smooth descent lacks
RISEN_RATE = 1.1  # times the rate at the reference: above, the schedule has raised it
SETTLING_LOOKS = 5  # after such a rise, and after the start: a rate too high still looks well

# Comparisons.
SPAN_LOOKS = 2  # looks that a comparison lasts: one is too short for harm that heals by itself
LEAST_GAIN = 0.01  # nats of the held-out loss by which going back or slower must be better
SEEN_BATCHES = 4  # of those trained on since the snapshot, which are scored
REST_LOOKS = 4  # looks without a comparison after one that was lost; doubled by each further loss
MOST_REST_LOOKS = 64  # so that a run that lost some by chance does not stay unguarded
SLOWER = 0.5  # of the learning rate, where no other rate is known to have worked; what returns
LEAST_SCALE = 1e-3  # of the learning rate; below it, a run stands still
HARMLESS = 0.005  # nats by which what changes no function may look worse, and hooks must gain

# Rollbacks without a comparison, for what is certain.
LADDER_LOOKS = 8  # looks within which rollbacks are counted
LADDER_RUNGS = 4  # which rollback within them is a stop: slower and further back were tried
BROKEN_STEPS = 8  # steps in a row that are not finite: one or two are met in healthy runs
BROKEN_STOP = 200  # such steps in a row that end the run, whatever the interval of looks

# The first learning rate. Usual updates are 0.001 to 0.02 of the first weights' norm.
TURNOVER_STEPS = 10  # over which updates are averaged, however long an interval of looks is
FAST_TURNOVER = 0.045  # all weights turn over in 22 steps
USUAL_TURNOVER = 0.008  # to which a lower rate aims
FIRST_TURNOVERS = 7.0  # of the weights, before which a lower rate does not yet look better
BEHIND = 0.03  # nats that a lower rate may be behind at FAST_TURNOVER, as it gains later

# Higher rates (orchestrator.raise_learning_rate) and what returns after a cut.
CALM_LOOKS = 3  # in a row that found nothing: at the top of the schedule, and after a cut
RAISE = 3.0  # times the rate in a comparison: a smaller step does not show within two looks
RAISE_SHARE = 0.25  # of the progress in the same steps, beside LEAST_GAIN
RAISE_SIGMAS = 2.0  # standard errors by which the training losses must agree, batch by batch

# Training losses by source, and how far tensors move between two looks.
USUAL_LOOKS = 6  # looks that tell what is usual: fewer do not tell the noise
SOURCE_MARGIN = 0.05  # nats above it; less is not worth a word
SOURCE_SIGMAS = 6.0  # standard errors above it: some sources have few rows, and long tails
SHARE_RATIO = 1.5  # between shares of a source: with another one it is learnt and forgotten anew
CHANGE_TIMES = 4.0  # the usual change of a tensor, beside what all tensors do

# Logits of attention.
LARGE_LOGIT = 100.0  # where arXiv:2507.20534 holds them; some published models have larger ones
LOGIT_GROWTH = 2.0  # times those at the reference

# Experts.
EXPERT_LOOKS = 10  # in a row with next to no tokens, or crowded: no balance mends that
CROWDED_SHARE = 0.3  # of dropped choices; a tenth is usual at capacity 1 (arXiv:2101.03961)
