"""Plans: from a job and its dead workers to a checked schedule with a proven lower bound.

planner     one plan, from all that follows; library, drift: many, kept, and made again where times changed
normalize   which vector of failures to plan for, and who moves
problem     the numbers that all of it works on; timing: how long an order takes
bounds      what no schedule can do without: closed forms, several chunks (chunked), a linear program (fluid)
deal        who runs what of the dead; template: one pipeline planned and copied; construct: the list scheduler;
            starts: the best of these, where a search begins
search      walks, several at once: policies varied and operations moved (improve, anneal), orders followed by
            their urgencies (refine, follow), parts re-ordered by a solver (windows, window, standing, disjunctive)
exact       small problems to the end
adapt       a given schedule, on whatever placement, without the dead
fuse        the backward split only where it pays
"""
