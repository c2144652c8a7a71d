"""Choosing the better of two recipes: the plan for the next experiment against running both to the end.

    python -m tests.benchmarks.bench_decide [--pairs=apart|near] [--repeats=20] [--at=16000] [--alpha=0.05]

Truth: every pair of the published 8B fits whose scores at --at differ by more than the margin (apart), or by less
(near). Evaluations every --spacing GPU-hours, with the noise of 1,000 prompts x 16. The better one has the higher true
score at --at.

    plan     both start with --start GPU-hours; then the run that the plan names is extended by what it names, at most
             --stride at a time, until the chance of a wrong choice is below --alpha or both are at the end
    equal    the same rule to stop, both always extended together by --stride
    to end   both run to --at, the higher fitted score there is chosen

Printed: how often the choice is right (right: the better one; good enough: no worse than the margin), and the compute
spent as a share of running both to the end (median, mean, 90th percentile).
"""

import itertools

import numpy as np
from absl import app, flags

from scalerl_jax.scaling import decide
from scalerl_jax.scaling.points import check_points
from tests.scaling.simulated import FIGURE_2, LEAVE_ONE_OUT, TABLE_1, curve, sampled_passes

FLAGS = flags.FLAGS
flags.DEFINE_enum("pairs", "apart", ["apart", "near"], "which pairs of recipes")
flags.DEFINE_integer("repeats", 10, "simulated runs of each pair", lower_bound=1)
flags.DEFINE_float("at", 16_000, "compute of a whole run")
flags.DEFINE_float("spacing", 256, "compute between two evaluations")
flags.DEFINE_float("start", 1_536, "compute that both runs are given")
flags.DEFINE_float("stride", 1_024, "compute of one extension at most")
flags.DEFINE_float("alpha", decide.DECIDED, "chance of a wrong choice that is small enough")
flags.DEFINE_float("margin", 0.02, "scores that differ by less do not differ")
flags.DEFINE_integer("curves", 2000, "drawn for each run")
flags.DEFINE_integer("most_pairs", 60, "taken evenly from all")
flags.DEFINE_integer("seed", 0, "of the simulation")


class Recipe:
    """A run that can be extended: its evaluations are simulated beforehand, and shown as far as it has come."""

    def __init__(self, name, triple, rng):
        self.name = name
        self.compute = np.concatenate([[0.0], np.arange(FLAGS.spacing, FLAGS.at + 1, FLAGS.spacing)])
        self.passes = sampled_passes(rng, curve(self.compute, *triple), runs=1)[0]
        self.reward = self.passes.mean(axis=1) / 16
        self.truth = float(curve(FLAGS.at, *triple))
        self.reached = FLAGS.start

    @property
    def end(self):
        return float(self.compute[-1])

    def contender(self, seed):
        seen = self.compute <= self.reached
        points = check_points(self.compute[seen], self.reward[seen], counts=(self.passes[seen], 16))
        return decide.contender(self.name, points, count=FLAGS.curves, seed=seed)

    def extend(self, extra):
        steps = max(1, round(min(extra, FLAGS.stride) / FLAGS.spacing))
        self.reached = min(self.end, self.reached + steps * FLAGS.spacing)


def choose(recipes, policy, seed):
    """Index of the chosen recipe; afterwards recipe.reached tells what was spent."""
    for recipe in recipes:
        recipe.reached = recipe.end if policy == "to end" else FLAGS.start
    while True:
        seed += 1
        runs = [recipe.contender(seed + 1000 * k) for k, recipe in enumerate(recipes)]
        scores = [run.curves.at([FLAGS.at])[:, 0].mean() for run in runs]
        left = [recipe.end - recipe.reached for recipe in recipes]
        if max(left) <= 0:
            return int(np.argmax(scores))
        found = decide.plan(runs, sum(left), at=FLAGS.at, margin=FLAGS.margin, seed=seed)
        if found.wrong <= FLAGS.alpha:
            return int(np.argmax(scores))
        if policy == "equal":
            extra = [FLAGS.stride] * 2
        else:
            extra = wanted(found, recipes, left)
        for recipe, more in zip(recipes, extra):
            if more > 0:
                recipe.extend(more)


def wanted(found, recipes, left):
    chosen = found.recommended
    if chosen is None:
        return [FLAGS.stride if room > 0 else 0.0 for room in left]
    extra = [min(room, chosen.extra.get(recipe.name, 0.0)) for recipe, room in zip(recipes, left)]
    return extra if max(extra) > 0 else [FLAGS.stride if room > 0 else 0.0 for room in left]


def chosen_pairs():
    published = {**TABLE_1, **{f"loo {k}": v for k, v in LEAVE_ONE_OUT.items()}, **FIGURE_2}
    published = {name: triple for name, triple in published.items() if triple[3] < 0.45 and "math" not in name}
    pairs = []
    for a, b in itertools.combinations(published, 2):
        apart = abs(float(curve(FLAGS.at, *published[a]) - curve(FLAGS.at, *published[b])))
        if (apart > FLAGS.margin) == (FLAGS.pairs == "apart"):
            pairs.append(((a, published[a]), (b, published[b])))
    keep = np.unique(np.linspace(0, len(pairs) - 1, min(FLAGS.most_pairs, len(pairs))).round().astype(int))
    return [pairs[i] for i in keep], len(pairs)


def main(_):
    pairs, of = chosen_pairs()
    print(f"{len(pairs)} of {of} pairs x {FLAGS.repeats}; a whole run is {FLAGS.at:g}, both start with {FLAGS.start:g}")
    results = {policy: [] for policy in ("plan", "equal", "to end")}
    for repeat, (index, pair) in itertools.product(range(FLAGS.repeats), enumerate(pairs)):
        rng = np.random.default_rng([FLAGS.seed, repeat, index])
        recipes = [Recipe(*one, rng) for one in pair]
        best = max(recipe.truth for recipe in recipes)
        for policy, rows in results.items():
            chosen = recipes[choose(recipes, policy, FLAGS.seed)]
            spent = sum(recipe.reached for recipe in recipes) / sum(recipe.end for recipe in recipes)
            rows.append((chosen.truth == best, chosen.truth >= best - FLAGS.margin, spent))
    for policy, rows in results.items():
        right, enough, spent = np.array(rows, float).T
        print(
            f"{policy:7} right {right.mean():.1%}  good enough {enough.mean():.1%}  "
            f"compute of both to the end: median {np.median(spent):.0%}, mean {spent.mean():.0%}, "
            f"90 % within {np.percentile(spent, 90):.0%}"
        )


if __name__ == "__main__":
    app.run(main)
