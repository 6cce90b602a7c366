"""Does a script that was converted to DistributedDataParallel train, print and save the same as before?
Or, with --resume: does a run that was killed go on as if it had never stopped?

Each run works in a copy of this folder. Status 0: the same; 1: not the same; 2: it cannot be judged."""
import argparse
import shutil
import signal
import sys
import traceback
import warnings

from outputs import compare_files, compare_lines
from running import Workspace
from training import Training, Verdict, see


def check_conversion(workspace, original, converted):
    first, second = workspace.run(original, "first"), workspace.run(original, "second")
    other = workspace.run(converted, "other", "the converted script", status=1)
    training = Training(first.ranks[0], [*other.ranks.values()])
    training.measure(second.ranks[0])
    not_split = [] if training.split() else ["not split between ranks: each of them computes the whole batch"]
    if faults := not_split + [fault for fault in [training.fault()] if fault]:
        raise Verdict(1, "; ".join(faults))
    writers = {(note["file"], note["rank"]) for note in other.of("wrote") if (other.copy / note["file"]).is_file()}
    several = [f"{file} is written by ranks {rank} and {more}: let rank 0 alone write it" + see("Saving")
               for file, rank in sorted(writers) for one, more in writers if one == file and more > rank]
    changed = sorted({text for run in (first, other) for step in run.of("step") for text in step["changed"]})
    return report(f"the same training: {len(training.base)} steps with {len(other.ranks)} processes",
                  [first, second, other], [run.copy for run in (first, second, other)], several, changed)


def report(title, runs, folders, bad, changed=(), anywhere=False):
    """Compares what is printed and saved, too."""
    printed, count, other_words = compare_lines([run.lines for run in runs], anywhere, all_of_them=anywhere)
    saved, same, left_out = compare_files(folders, anywhere)
    bad += [f"printed differently: {one}" for one in printed] + [f"saved differently: {one}" for one in saved]
    texts = [title, f"printed: {count - len(printed)} of {count} lines the same",
             f"saved: {len(same)} file{'s' * (len(same) != 1)} the same: {', '.join(same)}",
             f"in the check alone: {'; '.join(changed)}", f"not compared: {', '.join((left_out + other_words)[:5])}"]
    return int(bad != []), "\n".join([text for text in texts if not text.endswith(": ")] + bad)


def check_resume(workspace, command):
    """Whole; then killed in the step after the middle one of all saves; then started again in that copy."""
    whole = workspace.run(command, "first", "the unbroken run", force=False)
    base = whole.ranks[0]
    for one, *others in zip(*whole.ranks.values()):  # the samples of all ranks
        for place, rows in one["samples"].items():
            for step in others:
                for mine, more in zip(rows, step["samples"].get(place, ())):
                    mine += more
    saves = sorted({note["steps"] for note in whole.of("saved") if 0 < note["steps"] < len(base)})
    if not saves:
        raise Verdict(2, "it saves nothing before its last step")
    saved = saves[len(saves) // 2]
    killed = workspace.run(command, "other", status=0, force=False, kill=saved + 1)
    if fault := Training(base[:saved], [steps[:saved] for steps in killed.ranks.values()]).fault():
        raise Verdict(2, f"the script draws other numbers in each run, is it seeded? {fault}")
    before = shutil.copytree(killed.copy, killed.copy.parent / "when killed", symlinks=True)
    again = workspace.run(command, "other", "the restarted run", 1, (killed.copy.parent, killed.copy), False, saved)
    if fault := Training(base[saved:], [*again.ranks.values()], saved).fault():
        begins = [step for step, one in enumerate(base) if one["weights"] == again.ranks[0][0]["weights"]]
        begin = f"it begins with the weights of step {begins[0]}; " if any(begins) else "it starts afresh; "
        raise Verdict(1, f"killed at step {saved + 1}, saved at {saved}: {begin * bool(begins)}{fault}")
    again.lines = killed.lines + again.lines
    return report(f"a killed run goes on as if it had never stopped: killed at step {saved + 1} of {len(base)}",
                  [whole, killed, again], [whole.copy, before, again.copy], [], anywhere=True)


def main():
    parser = argparse.ArgumentParser("python tools/check_conversion", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("commands", nargs="+", metavar="COMMAND", help="the original and the converted one; with --resume, one")
    add("--resume", action="store_true", help="kill this one and start it again: does it go on as if it had never stopped?")
    add("--sync-batchnorm", dest="batchnorm", action="store_const", const="sync", help="compare BatchNorm as SyncBatchNorm")
    add("--rank-batchnorm", dest="batchnorm", action="store_const", const="rank", help="leave BatchNorm out, as each rank's own")
    add("--without", action="append", default=[], metavar="PATTERN", help="files to leave out of the copies: 'checkpoints/*.pt'")
    add("--patience", type=float, default=60, metavar="SECONDS", help="without activity, a run counts as hung (default: 60)")
    given = parser.parse_args()
    if len(given.commands) != 2 - given.resume:
        parser.error("give two commands, or --resume and one")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    warnings.simplefilter("ignore")
    workspace = Workspace(given.patience, given.batchnorm, given.without)
    try:
        status, text = (check_resume if given.resume else check_conversion)(workspace, *given.commands)
    except Verdict as verdict:
        status, text = verdict.args
        text = ("NOT THE SAME TRAINING: " if status == 1 else "cannot be judged: ") + text
    except KeyboardInterrupt:
        status, text = 2, "cannot be judged: interrupted"
    except Exception:
        status, text = 2, f"cannot be judged: the check itself failed: {traceback.format_exc()}"
    finally:
        shutil.rmtree(workspace.home, ignore_errors=True)
    print(text + "\n(sections of docs/your_own_script.md)" * ('(see "' in text), file=sys.stderr if status == 2 else sys.stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
