"""Does a script that was converted to DDP train, print and save the same as before?

command.py      starts three runs and says the verdict
workspace.py    the copy of the user's folder that each run works in
running.py      runs a command until it ends or hangs, and reads what it noted
start/, observed/   what runs inside the user's processes, and notes
protocol.py     what passes between the two: settings, files, records
verdict.py      judges the three runs by
  training.py     the weights, step by step, and causes.py: why a step differs
  outputs.py      what was printed, logged and saved
"""
