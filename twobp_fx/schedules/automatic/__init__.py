"""The automatic schedule: the best plan that can be found for given costs and a memory cap.

The steps, each of which stops the search when it meets the lower bound:

    bounds     a time that no plan can beat: work, warm-up, cooldown and memory of each rank
    catalog    the published schedules that keep the cap
    policies   list scheduling under many policies, then a climb from the best of them; always finds a plan
    exact      CP-SAT (the optional `solver` extra), warm-started, which also raises the bound
    fuse       B for I and W that run back to back, where B costs less
"""

from .find import Found, find_plan

__all__ = ["Found", "find_plan"]
