"""How the layers of a model part compute here: attention, norms, dropout, recomputation, and what tensor ranks share.

May import what `recycle.exec.model` may; knows nothing of stages. Begin reading at attention.py.
"""
