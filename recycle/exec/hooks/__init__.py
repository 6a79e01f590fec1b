"""What is optional in an iteration: a hook each, attached to the worker's loop through `hook.IterationHook`.

Faults have a folder of their own. To add a hook, override the points of the loop that it needs and list it in
`recycle.exec.worker.worker`. Begin reading at hook.py.
"""
