"""One elastic training run against its fixed twin: what sub-models keep without retraining.

    python benchmarks/elastic.py [--seed 3] [--arms fixed,elastic] [--work FOLDER] [--save]
    python benchmarks/elastic.py --quick     # a short training, three minutes
    python benchmarks/elastic.py --report    # the table over the committed seeds, no training

An elastic model and a fixed twin see the same tokens in the same order from the same first weights: real
digits to read, spoken digits to hear, text to continue. Both are then cut down without retraining, layers and
experts chosen on calibration samples and, as a control, at random. A run trains one seed, about eight minutes
an arm on one core; it goes on from checkpoints in ``--work``. The table and the last line, JSON, are means
over the seeds of ``benchmarks/results`` and the fresh one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _elastic_arms import ARMS, train_arm
from _elastic_data import CAPTIONS, DIGITS, TEXT, load_data
from _elastic_evaluation import SUBMODELS, Score, evaluate, k1_latency
from _measure import machine, print_json, rounded, show_machine, show_table

# A sub-model, and the arm that trains as small a network alone.
SMALL = {"keep5of8": "small-5of8", "keep3of8": "small-3of8", "half_width": "small-half", "k1": "small-k1"}
RESULTS = Path(__file__).parent / "results"
_TASKS = (DIGITS, CAPTIONS, TEXT)
STEPS, QUICK_STEPS = 360, 30
# (figure, least or most it should be, what it is compared with)
BARS: dict[str, tuple[str, float]] = {
    "retention_keep5of8": (">=", 0.92),
    "retention_keep5of8_gain": (">=", 0.05),
    "retention_keep3of8": (">=", 0.82),
    "retention_keep3of8_gain": (">=", 0.25),
    "loss_half_width": ("<=", 0.03),
    "loss_half_width_share": ("<=", 1 / 3),
    "loss_k1": ("<=", 0.03),
    "loss_k1_share": ("<=", 1 / 3),
    "full_loss_ratio": ("<=", 1.04),
    "k1_expert_latency_gain": (">=", 0.45),
    "k1_latency_gain": (">=", 0.2),
}


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    facts = machine(1)
    show_machine(facts)
    fresh = None
    if not options.report:
        if options.work is None:
            with tempfile.TemporaryDirectory() as folder:
                fresh = run(options, Path(folder), facts)
        else:
            fresh = run(options, options.work, facts)
    results = committed()
    if fresh is not None and fresh["steps"] == STEPS:
        results[fresh["seed"]] = joined(results.get(fresh["seed"]), fresh)
    if fresh is not None and options.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"elastic-seed{fresh['seed']}.json"
        path.write_text(json.dumps(rounded(results[fresh["seed"]], 5), indent=1) + "\n")
        print(f"written: {path}")
    if options.pictures is not None:
        draw(options, results)
    print_json(summary(results, fresh, facts))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=3, help="of weights, draws and order; default: 3")
    parser.add_argument("--arms", default="fixed,elastic", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}, as committed")
    parser.add_argument("--work", type=Path, help="keeps tokens, checkpoints and models; default: none kept")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, an eighth of the test")
    parser.add_argument("--tiny", action="store_true", help="a few steps, for tests of this script")
    parser.add_argument("--report", action="store_true", help="no training: the committed results")
    parser.add_argument("--save", action="store_true", help="write the seed's file in benchmarks/results")
    parser.add_argument("--pictures", type=Path, help="a folder: draws what is kept, and curves of --work")
    parser.add_argument("--threads", type=int, default=1, help="only 1: times are CPU times of one thread")
    options = parser.parse_args()
    if options.threads != 1:
        parser.error("this benchmark trains and times on one thread; leave --threads 1")
    options.arms = [name.strip() for name in options.arms.split(",")]
    unknown = [name for name in options.arms if name not in ARMS]
    if unknown:
        parser.error(f"unknown arms {', '.join(unknown)}; known: {', '.join(ARMS)}")
    if options.quick or options.tiny:
        options.steps = 3 if options.tiny else QUICK_STEPS
    if options.save and options.steps != STEPS:
        parser.error(f"only runs of {STEPS} steps are saved, so that seeds compare")
    return options


def run(options: argparse.Namespace, work: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Train and evaluate the arms of one seed; arms evaluated before are read from ``work``."""
    data = load_data(work)
    part = 40 if options.tiny else 8 if options.quick else 1
    result: dict[str, Any] = {
        "seed": options.seed,
        "steps": options.steps,
        "arms": {},
        "machine": dict(facts),
    }
    for name in options.arms:
        every = 0 if options.quick or options.tiny else 60
        model, trained = train_arm(name, options.seed, data, work, steps=options.steps, validate_every=every)
        known = work / f"{name}-seed{options.seed}-{options.steps}" / "scores.json"
        if known.exists():
            scores = json.loads(known.read_text())
        else:
            print(f"  {name}: sub-models without retraining", flush=True)
            alone = name in SMALL.values()
            scores = evaluate(model, data, part=part, submodels=not alone, on_score=_show_score)
            known.write_text(json.dumps(scores))
        result["arms"][name] = {"training": trained, "scores": scores}
        if name == "elastic":
            result["latency"] = k1_latency(model, data, rounds=3 if options.tiny else 15)
    return result


def _show_score(name: str, score: Score) -> None:
    print(
        f"    {name:20s} digits {score.digits:.3f}  captions {score.captions:.3f}  text {score.text:.3f}",
        flush=True,
    )


def draw(options: argparse.Namespace, results: Mapping[int, Mapping[str, Any]]) -> None:
    """``elastic_kept.png`` of all seeds, ``elastic_curves.png`` of this seed's trainings in ``--work``."""
    from _elastic_plots import draw_curves, draw_kept

    options.pictures.mkdir(parents=True, exist_ok=True)
    both = [result for result in results.values() if {"fixed", "elastic"} <= result["arms"].keys()]
    if both:
        draw_kept(both, list(SUBMODELS), options.pictures / "elastic_kept.png")
    if options.work is not None:
        runs = {
            arm: options.work / f"{arm}-seed{options.seed}-{options.steps}" for arm in ("fixed", "elastic")
        }
        if all(folder.exists() for folder in runs.values()):
            draw_curves(runs, options.pictures / "elastic_curves.png")


def joined(before: Mapping[str, Any] | None, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """A seed's result with the arms of a fresh run added or replaced, so that arms can be run one by one.

    Machine and latency are those of the run that timed the elastic arm.
    """
    if before is None:
        return dict(fresh)
    timed = fresh if "latency" in fresh else before
    return {**timed, "arms": {**before["arms"], **fresh["arms"]}}


def committed() -> dict[int, dict[str, Any]]:
    """Results of earlier runs by seed."""
    found = (json.loads(path.read_text()) for path in sorted(RESULTS.glob("elastic-seed*.json")))
    return {result["seed"]: result for result in found}


def kept(scores: Mapping[str, Any], suffix: str = "") -> dict[str, float]:
    """``retention_…`` of accuracy and ``loss_…`` rise of text, against the arm's own full model."""
    full = scores["full"]
    figures = {}
    for name in SUBMODELS:
        score = scores.get(name + suffix) or scores[name]
        figures[f"retention_{name}"] = _accuracy(score) / max(_accuracy(full), 1e-9)
        figures[f"loss_{name}"] = score["text"] / full["text"] - 1
    return figures


def _accuracy(score: Mapping[str, float]) -> float:
    return (score["digits"] + score["captions"]) / 2


def figures_of(result: Mapping[str, Any], elastic: str = "elastic") -> dict[str, float]:
    """The documented figures of one seed; those against the twin only where both arms were trained."""
    arms = result["arms"]
    own = kept(arms[elastic]["scores"]) if elastic in arms else {}
    twin = kept(arms["fixed"]["scores"]) if "fixed" in arms else {}
    figures = own | {f"fixed_{name}": value for name, value in twin.items()}
    if own and twin:
        full, other = arms[elastic]["scores"]["full"], arms["fixed"]["scores"]["full"]
        figures["full_loss_ratio"] = full["text"] / other["text"]
        figures["full_accuracy_ratio"] = _accuracy(full) / max(_accuracy(other), 1e-9)
    if elastic == "elastic":
        latency = result.get("latency", {})
        figures |= {name: latency[name] for name in latency if name.endswith("_gain")}
    return figures


def mean_of(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each figure over the seeds that have it, and what the bars compare."""
    names = dict.fromkeys(name for some in figures for name in some)
    mean = {name: statistics.fmean(some[name] for some in figures if name in some) for name in names}
    for name in ("retention_keep5of8", "retention_keep3of8"):
        if f"fixed_{name}" in mean and name in mean:
            mean[f"{name}_gain"] = mean[name] - mean[f"fixed_{name}"]
    for name in ("loss_half_width", "loss_k1"):
        if f"fixed_{name}" in mean and name in mean:
            mean[f"{name}_share"] = mean[name] / max(mean[f"fixed_{name}"], 1e-9)
    return mean


def summary(
    results: Mapping[int, Mapping[str, Any]], fresh: Mapping[str, Any] | None, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Tables for people, and the JSON."""
    if not results:
        assert fresh is not None, "no committed results; run without --report"
    by_seed = {seed: figures_of(result) for seed, result in sorted(results.items())}
    mean = mean_of(list(by_seed.values()))
    if fresh is not None and not _learnt(fresh):
        print(
            f"\n{fresh['steps']} steps teach too little for retention to mean anything: a check that all runs"
        )
    if results:
        show_scores(results)
        show_bars(mean, by_seed)
        show_roads(results)
        show_small(results)
    return {
        "benchmark": "elastic",
        "seeds": sorted(results),
        **mean,
        "missed": [name for name in BARS if name in mean and not _holds(name, mean[name])],
        "by_seed": {str(seed): figures for seed, figures in by_seed.items()},
        "random": mean_of(
            [
                kept(result["arms"]["elastic"]["scores"], "_random")
                | {
                    f"fixed_{name}": value
                    for name, value in kept(result["arms"]["fixed"]["scores"], "_random").items()
                }
                for result in results.values()
                if {"elastic", "fixed"} <= result["arms"].keys()
            ]
        ),
        "fresh": None
        if fresh is None
        else {"seed": fresh["seed"], "steps": fresh["steps"], "learnt": _learnt(fresh), **figures_of(fresh)},
        "machine": dict(facts),
    }


def _learnt(result: Mapping[str, Any]) -> bool:
    """Whether every arm answers well above chance (a tenth): what a guess keeps says nothing."""
    return all(_accuracy(arm["scores"]["full"]) > 0.3 for arm in result["arms"].values())


def _holds(name: str, value: float) -> bool:
    sign, bar = BARS[name]
    return value >= bar if sign == ">=" else value <= bar


def show_scores(results: Mapping[int, Mapping[str, Any]]) -> None:
    """Means over the seeds: every sub-model of both arms."""
    rows = []
    for name in ("full", *(name + suffix for name in SUBMODELS for suffix in ("", "_random"))):
        row: dict[str, Any] = {"sub-model": name}
        for arm in ("fixed", "elastic"):
            scores = [result["arms"][arm]["scores"] for result in results.values() if arm in result["arms"]]
            having = [some for some in scores if name in some]
            if not having:
                continue
            for key in _TASKS:
                row[f"{arm} {key}"] = statistics.fmean(some[name][key] for some in having)
            row[f"{arm} kept"] = statistics.fmean(
                _accuracy(some[name]) / max(_accuracy(some["full"]), 1e-9) for some in having
            )
            row[f"{arm} loss"] = statistics.fmean(
                some[name]["text"] / some["full"]["text"] - 1 for some in having
            )
        if len(row) > 1:
            rows.append(row)
    columns = [
        f"{arm} {key}"
        for arm in ("fixed", "elastic")
        for key in ("digits", "captions", "kept", "text", "loss")
    ]
    print(f"\nwithout retraining, mean of seeds {', '.join(map(str, sorted(results)))}")
    show_table(rows, ["sub-model", *columns])


def show_bars(mean: Mapping[str, float], by_seed: Mapping[int, Mapping[str, float]]) -> None:
    """What should hold, what does, and the range over the seeds."""
    rows = []
    for name, (sign, bar) in BARS.items():
        if name not in mean:
            continue
        values = [mean_of([figures]).get(name) for figures in by_seed.values()]
        seeds = [value for value in values if value is not None]
        rows.append(
            {
                "figure": name,
                "bar": f"{sign} {bar:.3g}",
                "mean": mean[name],
                "least": min(seeds),
                "most": max(seeds),
                "holds": "yes" if _holds(name, mean[name]) else "NO",
            }
        )
    print()
    show_table(rows, ["figure", "bar", "mean", "least", "most", "holds"])


def show_roads(results: Mapping[int, Mapping[str, Any]]) -> None:
    """Other ways to train, each beside the plain elastic arm of its seed."""
    rows = []
    shown = ("full_loss_ratio", "retention_keep5of8", "retention_keep3of8", "loss_half_width", "loss_k1")
    for seed, result in sorted(results.items()):
        others = [name for name in result["arms"] if name not in ("fixed", "elastic", *SMALL.values())]
        if not others or "fixed" not in result["arms"]:
            continue
        for name in ("fixed", "elastic", *others):
            if name in result["arms"]:
                figures = figures_of(result, name)
                rows.append({"seed": seed, "arm": name} | {key: figures.get(key) for key in shown})
    if rows:
        print("\nother arms")
        show_table(rows, ["seed", "arm", *shown])


def show_small(results: Mapping[int, Mapping[str, Any]]) -> None:
    """Sub-models beside networks of their size that were trained alone, where there are any."""
    rows = []
    for seed, result in sorted(results.items()):
        for submodel, arm in SMALL.items():
            if arm in result["arms"] and "elastic" in result["arms"]:
                own = result["arms"]["elastic"]["scores"][submodel]
                alone = result["arms"][arm]["scores"]["full"]
                rows.append(
                    {"seed": seed, "sub-model": submodel}
                    | {f"elastic {key}": own[key] for key in _TASKS}
                    | {f"alone {key}": alone[key] for key in _TASKS}
                )
    if rows:
        print("\nsmall networks trained alone")
        show_table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
