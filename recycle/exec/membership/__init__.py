"""Membership: who is alive, which generation, which plan, what is committed. One register, changed by compare-and-set.

The protocol, on a store that the launcher owns and no worker can take down with it:

    register            the GenerationRecord: generation, live set, roles, plan, last committed step and its Commit
    proposal/<g>        the GenerationRecord that generation g begins with
    ack/<g>/<w>         worker w has left its old generation and is ready to form g
    form/<g>, run/<g>   "go" once all have acknowledged, and once all groups stand; "void" if g is over before that
    formed/<g>/<w>      "" when w's groups stand, else why not
    report/<g>/<n>/<w>  w's reduces of iteration n are complete: its stages' squared norms, its losses, its times
    commit/<g>/<n>      the Commit of iteration n, or "void": written once, after the register holds them
    undone/<n>/<w>      w has taken back its step of iteration n
    stop/<g>            generation g is over
    trouble/<g>         a worker's transport broke; somebody else may be the cause
    cut/<g>             two workers, of which the first found that the other does not answer on their connection
    ready/<w>/<i>       the i-th process of w has finished starting up
    beat/<w>            w's heartbeat with its progress
    fault/<i>           fault i of the run has reached its point
    struck/<i>          the launcher has struck it
    plan/<hash>         a plan file's text
    periods/<hash>      its period in each mode
    saved/<n>/<s>       stage s of the checkpoint of iteration n is written, or why not
    warning             what some worker could not do and could do without
    final/<w>           sha256 of the final state of w's stages
    over                a process has ended behind the last commit

With tensor parallelism, each process of a worker writes its own ack, formed, report, undone, ready, beat and final,
under its own name (members.py), and they count when all of the worker's have.
What workers write for the launcher is posted, which wakes it; heartbeats are not. What is committed and read by all
is deleted. Every key that a worker waits for is written in the end: a generation that ends turns what is still open
into "void".
What a timeout or a silence means is decided by the coordinator (coordinator.py) and nowhere else.
"""
