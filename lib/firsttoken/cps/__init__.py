"""CPS, Cross-Point Scheduling: a preempted request is swapped or computed again, whichever is cheaper at its length.

The engine has the mechanism (``engine.preemption``, ``engine.swap``); a policy of ``cps.policies`` decides.
"""
