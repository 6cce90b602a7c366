"""Does a script that was converted to DDP train, print and save the same as before?

In the order in which they come to work:

command.py      has three runs made, the converted script's and two of the original, and says the verdict
workspace.py    the copy of the user's folder that each run works in
running.py      runs a command until it ends or hangs, and reads what it noted and how it ended
protocol.py     what passes between the check and the processes it observes: settings, files, records

start/sitecustomize.py   is what each Python process of a run finds first: it installs observed/
observed/       works inside the user's processes
  notes.py        where a process notes, prints and says where it is
  guard.py        lets it write into its copy alone
  comparable.py   no dropout; float64
  batchnorm.py    BatchNorm over all ranks, or frozen
  precision.py    no autocast, and what would be on without the check
  sampling.py     one order of the samples, and the pass over them that each step belongs to
  generators.py   which random numbers were drawn, and by which line
  sketch.py       tensors in a few numbers
  steps.py        each optimizer step, and what the model was fed
  untrained.py    buffers, and modules that no optimizer holds
  contents.py     what is in a file of torch.save, read by the check itself too
  saving.py       that torch.save saves it
  figures.py      what TensorBoard, wandb and tqdm are given
  second_run.py   what differs on purpose in the second run of the original: rounding and clocks

judge.py        the verdict, a function of the three runs
training.py     compares the weights and all that ranks must have alike, step by step
samples.py      which samples a step was made of
buffers.py      whether buffers differ, or modules that no optimizer holds
causes.py       why a step differs, by the evidence of these three
outputs.py      compares what was printed, shown and logged
new_files.py    reads what a run has left in its copy, when it has ended
files.py        compares that, and what torch.save was seen to save
distances.py    how far two tensors are apart, and may be
verdict.py      what a verdict is made of
"""
