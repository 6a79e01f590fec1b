"""Hooks: optional features of an iteration, attached to the worker's loop through `hook.IterationHook`.

Faults have a separate folder. To add a hook, override the methods that it needs and list it in
`recycle.exec.worker.worker`. Begin with hook.py.
"""
