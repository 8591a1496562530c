"""Scheduling policies: who comes first."""

from jaxserve.scheduling.policies.base import Policy as Policy
from jaxserve.scheduling.policies.base import View as View
from jaxserve.scheduling.policies.base import ViewOf as ViewOf
from jaxserve.scheduling.policies.base import check_is_policy as check_is_policy
from jaxserve.scheduling.policies.base import never as never
from jaxserve.scheduling.policies.base import unlimited as unlimited
from jaxserve.scheduling.policies.base import unmoved as unmoved
from jaxserve.scheduling.policies.combine import bounded_wait as bounded_wait
from jaxserve.scheduling.policies.combine import chain as chain
from jaxserve.scheduling.policies.fair_share import fair_share as fair_share
from jaxserve.scheduling.policies.mlfq import mlfq as mlfq
from jaxserve.scheduling.policies.prefix import prefix_affinity as prefix_affinity
from jaxserve.scheduling.policies.prefix import prefix_sjf as prefix_sjf
from jaxserve.scheduling.policies.queues import edf as edf
from jaxserve.scheduling.policies.queues import fcfs as fcfs
from jaxserve.scheduling.policies.queues import priority as priority
from jaxserve.scheduling.policies.registry import POLICIES as POLICIES
from jaxserve.scheduling.policies.registry import get_policy as get_policy
from jaxserve.scheduling.policies.registry import split_specs as split_specs
from jaxserve.scheduling.policies.sjf import hrrn as hrrn
from jaxserve.scheduling.policies.sjf import sjf as sjf
from jaxserve.scheduling.policies.sjf import srpt as srpt
