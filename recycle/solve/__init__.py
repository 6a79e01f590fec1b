"""Plans: from a job and its dead workers to a checked schedule with a proven lower bound.

planner         one plan, from all that follows
filling         many plans, for a library: which vectors, in how much time
refreshing      a library's plans after times have changed
normalize       which vector of failures to plan for, and which live workers move for it
problem         the numbers that everything works on, and orders of operations
assignment      assignments: which live worker runs each micro-batch at each stage; the one place where this is decided
template        one pipeline, planned without failures, and copied to all or unfolded
bounds/         periods that no schedule can fall below: closed forms and a linear program on grids of time
search/         list scheduling (event_loop, list_scheduling) and timing of orders (order_kernels, timing); where a
                search begins (initial_orders): policies, schedule families (family_orders), insertion, with and
                without slow workers; the template before the whole (from_template); searches over waves, manners of
                insertion, policies (policy_search), latest start times (refine) and single operations (annealing);
                several of them at once (walks); compiled loops, and when they are loaded (kernels)
time_indexed    small problems solved to optimality, as an integer program in a child process
adapt           a given schedule, on whatever placement, without the dead workers
fuse_backward   the backward pass is split only where that pays
effort          the best order so far, deadlines, and what a search may spend; processes: several searches at once
"""
