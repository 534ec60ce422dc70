"""Value of phase multiplexing: `python -m benchmarks.rollmux --json PATH`.

Simulated, not measured: W1 under every arm, seed by seed, on the production policies. `--resume
DIR` keeps every arm's result, so that a long run may be taken in pieces.
"""

import argparse
import os
from pathlib import Path

from benchmarks.rollmux.arm_figures import chosen_arms
from benchmarks.rollmux.arms import ARMS
from benchmarks.rollmux.decisions import decision_times
from benchmarks.rollmux.determinism import deterministic
from benchmarks.rollmux.disturbed import drift_figures, failure_figures, world_figures
from benchmarks.rollmux.figures import mix_figures, single_workload
from benchmarks.rollmux.harvest import harvest_figures
from benchmarks.rollmux.harvest_bound import INSTANCES, bound_figures
from benchmarks.rollmux.headroom import HARVESTED_RATIO
from benchmarks.rollmux.mixes import Mix
from benchmarks.rollmux.optimum import optimum_figures
from benchmarks.rollmux.pieces import ArmOfSeed, Pieces
from benchmarks.rollmux.variants import AS_PUBLISHED, VARIANTS
from benchmarks.testbed.reporting import report
from harvester.contracts.errors import ConfigError
from harvester.platform.whole_file import make_writable
from scheduler.sim.rollmux.baselines import UNSHARED
from scheduler.sim.rollmux.workload import JOBS, Drift
from scheduler.sim.rollmux.workload_csv import read_workload

PARTS = (
    "quality",
    "w2",
    "w3",
    "drift",
    "worlds",
    "optimum",
    "failures",
    "harvest",
    "harvest_bound",
    "decisions",
    "determinism",
)
QUICK_JOBS = 24
"""Jobs of the harvest part's one seed."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rollmux", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--workload", type=Path, help="CSV instead of W1; one seed, all arms")
    parser.add_argument("--events", type=Path, help="our arm's events as JSON lines")
    parser.add_argument("--drift", type=Drift, choices=list(Drift), default=Drift.NONE)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--instances", type=int, default=50, help="of 6 to 10 jobs, for the optimum"
    )
    parser.add_argument(
        "--mtbf-h", type=float, default=250.0, help="hours that a node lives in part failures"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        default=[],
        help="production traces for the harvest part (t_s,input_tokens,output_tokens)",
    )
    parser.add_argument(
        "--busy-share", type=_share, default=0.5, help="of serving alone, in the harvest part"
    )
    parser.add_argument(
        "--harvested-ratio",
        type=_ratio,
        default=HARVESTED_RATIO,
        help="of serving's idle time that a guest gets, in the harvest part",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        choices=range(1, JOBS + 1),
        metavar="N",
        default=JOBS,
        help="of a seed, in the harvest part and with --arm",
    )
    parser.add_argument(
        "--arm",
        action="append",
        choices=(*ARMS, *UNSHARED),
        help="this arm alone instead of the parts, on --mix, --drift and --variant; repeatable",
    )
    parser.add_argument("--mix", type=Mix, choices=list(Mix), default=Mix.W1)
    parser.add_argument("--variant", choices=list(VARIANTS), default=AS_PUBLISHED)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--resume", type=Path, help="directory of results that are kept")
    parser.add_argument(
        "--workers",
        type=_count,
        default=len(os.sched_getaffinity(0)),
        help="processes that run arms side by side; by default one a core",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, 3 instances, no drift")
    given = parser.parse_args()
    report("rollmux", lambda: _measured(given), given.json, engines=False)


def _measured(given: argparse.Namespace) -> dict[str, object]:
    if given.events is not None:
        make_writable(given.events)
    try:
        return _result(given)
    except OSError as error:
        raise ConfigError(str(error)) from error


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share < 1.0:
        raise ValueError(text)
    return share


def _ratio(text: str) -> float:
    ratio = float(text)
    if not 0.0 < ratio <= 1.0:
        raise ValueError(text)
    return ratio


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _result(given: argparse.Namespace) -> dict[str, object]:
    if given.workload is not None:
        jobs = read_workload(given.workload, seed=given.first_seed)
        return single_workload(jobs, seed=given.first_seed, events=given.events)
    seeds = range(given.first_seed, given.first_seed + (1 if given.quick else given.seeds))
    parts = set(given.parts) - (
        {"drift", "w2", "w3", "worlds", "failures", "determinism"} if given.quick else set()
    )
    pieces = Pieces(given.resume, workers=given.workers)
    if given.arm:
        return {"simulated": True, "arms": chosen_arms(_chosen(given, seeds), pieces)}
    result: dict[str, object] = {"simulated": True, "seeds": len(seeds)}
    if "quality" in parts:
        result["quality"] = mix_figures(seeds, pieces, drift=given.drift, events=given.events)
    if "w2" in parts:
        result["w2"] = mix_figures(seeds, pieces, mix=Mix.W2, drift=given.drift)
    if "w3" in parts:
        result["w3"] = mix_figures(seeds, pieces, mix=Mix.W3)
    if "drift" in parts:
        result["drift"] = drift_figures(seeds, pieces)
    if "worlds" in parts:
        result["worlds"] = world_figures(seeds, pieces)
    if "optimum" in parts:
        result |= optimum_figures(3 if given.quick else given.instances, pieces)
    if "failures" in parts:
        result["failures"] = failure_figures(seeds, pieces, mtbf_h=given.mtbf_h)
    if "harvest" in parts:
        result |= _harvested(given, seeds, pieces)
    if "harvest_bound" in parts:
        result |= bound_figures(1 if given.quick else INSTANCES, pieces)
    if "decisions" in parts:
        result |= decision_times(quick=given.quick)
    if "determinism" in parts:
        result["deterministic"] = deterministic()
    return result


def _chosen(given: argparse.Namespace, seeds: range) -> dict[str, list[ArmOfSeed]]:
    return {
        name: [
            ArmOfSeed(
                name=name,
                seed=seed,
                mix=given.mix,
                drift=given.drift,
                variant=given.variant,
                jobs=given.jobs,
            )
            for seed in seeds
        ]
        for name in given.arm
    }


def _harvested(given: argparse.Namespace, seeds: range, pieces: Pieces) -> dict[str, object]:
    return harvest_figures(
        seeds,
        pieces,
        traces=given.trace,
        busy_share=given.busy_share,
        harvested_ratio=given.harvested_ratio,
        jobs=QUICK_JOBS if given.quick else given.jobs,
    )


if __name__ == "__main__":
    main()
