"""Checks that a converted script trains the same as before, by running both:

check-conversion "python train.py --epochs 2" \\
    "torchrun --standalone --nproc_per_node=2 train_ddp.py --epochs 2"

The status is 0 if both train, print and save the same, 1 if not, 2 if that
cannot be judged. Each run has a copy of this folder; nothing in the folder
itself changes.
"""
import argparse
import functools
import os
import re
import signal
import sys
import traceback

from check_conversion.judge import check_original, judge
from check_conversion.protocol import About, BatchNorm
from check_conversion.running import own_error, run
from check_conversion.verdict import CannotSay
from check_conversion.workspace import Workspace

OUTPUTS = (1, 2)  # the check's own: files that the user may have opened for it in the folder


def compare(before, after, float32=False):
    """The verdict; before and after run a command, with options of protocol.Settings."""
    # The converted script comes first: it says whether BatchNorm can be compared, or the original's must be frozen too.
    converted = after(float64=not float32)
    if not float32 and (reason := no_float64(converted)):
        return in_float32(before, after, reason)
    frozen = BatchNorm.FROZEN in converted.batchnorm
    if frozen and BatchNorm.SYNCHRONISED in converted.batchnorm:  # the original has nothing by which to freeze a part
        converted = after(float64=not float32, batchnorm_frozen=True)
    original = before(float64=not float32, batchnorm_frozen=frozen)
    if not float32 and (reason := no_float64(original)):
        return in_float32(before, after, reason)
    check_original(original)
    nudged = before(float64=not float32, batchnorm_frozen=frozen, nudged=True)
    return judge(original, nudged, converted)


def no_float64(run):
    """Why a script has to be compared in its own precision."""
    if found := run.remarks(About.FLOAT32):
        return found[0]
    error = own_error(run.stderr) if run.status else ""
    return error if re.search(r"dtype|float|Float|double|Double", error) else ""


def in_float32(before, after, reason):
    verdict = compare(before, after, float32=True)
    verdict.lines.append(f"compared in float32, because the script does not work in float64: {reason}")
    return verdict


def check(args, workspace):
    verdict = compare(functools.partial(run, args.before, workspace, args),
                      functools.partial(run, args.after, workspace, args), args.float32)
    if changed := workspace.changed(OUTPUTS):
        raise CannotSay(f"{changed[0]} changed during the check: one of the scripts changed it, unless you did")
    return verdict


def parse_args():
    parser = argparse.ArgumentParser(
        prog="check-conversion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the command that trains in one process")
    parser.add_argument("after", help="the command that trains with DDP")
    parser.add_argument("--link", action="append", default=[], metavar="DIR",
                        help="a folder that is too large to copy: it is read where it is")
    parser.add_argument("--without", action="append", default=[], metavar="PATTERN",
                        help="files to leave out of the copies, such as 'checkpoints/*.pt'")
    parser.add_argument("--float32", action="store_true",
                        help="compare in float32, which is less sensitive, but faster on GPUs")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS",
                        help="seconds without any activity until a run counts as hung (default: 60)")
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
        print("cannot be judged: the check itself failed", file=sys.stderr)
    finally:
        if workspace:
            workspace.remove()
    return 2
