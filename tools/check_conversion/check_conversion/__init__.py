"""Does a script that was converted to DDP train, print and save the same as before?

In the order in which they come to work:

command.py      has three runs made, the converted script's and two of the original, and says the verdict
workspace.py    the copy of the user's folder that each run works in
running.py      runs a command until it ends or hangs, and reads what it recorded and how it ended
records.py      what passes between the check and the processes it observes: settings, and a stream of records

start/sitecustomize.py   is what each Python process of a run finds first: it installs observed/
observed/       works inside the user's processes
  process.py       records, prints, says where it is; lets the process write into its copy alone
  steps.py         each optimizer step, and what the model was fed; for --resume the kill
  modules.py       names of parameters, and tensors that no optimizer holds
  figures.py       what TensorBoard, wandb and tqdm are given
  order.py         one order of the samples
  interventions.py what else makes runs comparable: no dropout, float64, BatchNorm over all ranks, rounding and clocks
sketch.py       tensors in a few numbers, and how far two are apart
files.py        reads what a run has left in its copy, when it has ended

judge.py        the verdict, a function of the three runs
training.py     compares them step by step, as far as rounding lets it
causes.py       why a step differs: the causes, in the order of a step
samples.py      which samples a step was made of
outputs.py      compares what was printed, shown, logged and left in files
resume.py       the verdict of --resume: its three runs, what is compared of them, and its own causes
verdict.py      what a verdict is made of
"""
