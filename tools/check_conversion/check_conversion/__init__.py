"""Does a script that was converted to DDP train, print and save the same as before?

command.py      starts three runs, the converted script first, and says the verdict
workspace.py    the copy of the user's folder that each run works in
running.py      runs a command until it ends or hangs, and reads what it noted
start/, observed/   what runs inside the user's processes, and notes
protocol.py     what passes between the two: settings, files, records
judge.py        the verdict, a function of the three runs, by
  training.py     the weights, step by step; precision.py: autocast
  causes.py       why a step differs; samples.py: what it was fed; beside.py: buffers
  outputs.py      what was printed, logged and saved; left.py: other files
"""
