"""Does my converted script train the same as before? It runs both:

check-conversion "python train.py --epochs 2" \\
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --epochs 2"

The status is 0 where they train, print and save the same, 1 where not, 2 where
that cannot be said. Each run has a copy of this folder; nothing in the folder
itself changes.
"""
import argparse
import os
import signal
import sys
import traceback

from check_conversion.judge import check_nudged, check_original, judge
from check_conversion.running import run
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace

OUTPUTS = (1, 2)  # the check's own: files that the user may have opened for it in the folder


def check(args, workspace):
    converted = run(args.after, workspace, args)  # the first, for it says how BatchNorm is computed
    kept = converted.batchnorm >= {"kept"}
    if kept and len(converted.batchnorm) > 1:  # of both kinds: none of it can be compared
        converted = run(args.after, workspace, args, batchnorm_kept=True)
    original = run(args.before, workspace, args, batchnorm_kept=kept)
    check_original(original)
    nudged = run(args.before, workspace, args, batchnorm_kept=kept, nudged=True)
    check_nudged(original, nudged)
    verdict = judge(original, nudged, converted)
    if changed := workspace.changed(OUTPUTS):
        raise CannotSay(f"{changed[0]} has changed meanwhile: by one of the scripts, if not by you")
    return verdict


def parse_args():
    parser = argparse.ArgumentParser(
        prog="check-conversion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the command that trains in one process")
    parser.add_argument("after", help="the command that trains with DDP")
    parser.add_argument("--link", action="append", default=[], metavar="DIR",
                        help="a folder that is too large to copy: it is read where it is")
    parser.add_argument("--without", action="append", default=[], metavar="PATTERN",
                        help="files that the copies lack: 'checkpoints/*.pt'")
    parser.add_argument("--float64", action="store_true", help="compare in float64, for sharper verdicts")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS",
                        help="seconds without a step before it counts as hung (60)")
    return parser.parse_args()


def main():
    """The status: 0 the same, 1 not the same, 2 cannot be judged."""
    args = parse_args()
    args.interrupted = []  # looked at where nothing is half done
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: args.interrupted.append(True))
    workspace = None
    try:
        workspace = Workspace(os.getcwd(), args.link, args.without)
        verdict = check(args, workspace)
        print(*verdict.lines, sep="\n")
        return verdict.status
    except CannotSay as reason:
        print(f"cannot be judged: {reason}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        print("cannot be judged: an error of the check's own", file=sys.stderr)
    finally:
        if workspace:
            workspace.remove()
    return 2
