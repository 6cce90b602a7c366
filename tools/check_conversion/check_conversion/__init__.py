"""Does a script that was converted to DDP train, print and save the same as before?

The modules in the order in which they come to work; each begins with what it does.

command, workspace, running         have three runs made: the converted script's and two of the original
records                             is what passes between the check and the processes that it observes
start/sitecustomize, observed/      work in these: process, steps, modules, figures, order, interventions
sketch, files                       what is kept of tensors, and of the files that a run leaves
judge, training, causes, samples    the verdict, a function of the three runs: their training
outputs, resume, verdict            what they printed and wrote; that of --resume; what a verdict is made of
"""
