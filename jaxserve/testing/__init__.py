"""For who writes a scheduling policy: the rules that every policy keeps, as one check.

>>> from jaxserve.scheduling.policies import fcfs
>>> check_policy(fcfs(), bounded_wait=0)
"""

from jaxserve.testing.conformance import RULES as RULES
from jaxserve.testing.conformance import check_policy as check_policy
