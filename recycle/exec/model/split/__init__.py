"""The backward in two halves, I and W, and where the gradients go that it makes.

Begin reading at backward.py.
"""
