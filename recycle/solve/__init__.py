"""Planning: from a job and its dead workers to a checked schedule with a proven lower bound.

planner         one plan, from all modules below; begin here
filling         many plans, for a library
refreshing      plans of a library under new times
normalize       failure vector to plan for, and the live workers that move
problem         the planning problem in numbers, and orders of operations
assignment      live worker of each micro-batch at each stage
template        a fault-free pipeline whose order is copied or unfolded
bounds/         lower bounds: closed forms and linear programs
search/         list scheduling, insertion, waves, policies and annealing
layout/         layouts in which live workers host other layers than before
time_indexed    exact integer program for small problems, in a child process
adapt           a given schedule on any placement, without the dead workers
fuse_backward   fuses I and W where splitting the backward pass does not pay
effort          incumbents, deadlines and limits of a search
constants       tuned constants, and the commands that check them
processes       tasks in several processes
"""
