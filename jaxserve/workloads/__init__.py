"""What a run is given: requests with arrival times, lengths and shared prefixes.

Owns generators, twins of public traces and their readers. Never sees an engine, a
policy or an executor: an output's true length is data here, and the caller decides who
may read it.
"""

from jaxserve.workloads.jobs import Chain as Chain
from jaxserve.workloads.jobs import Job as Job
from jaxserve.workloads.jobs import Tokens as Tokens
from jaxserve.workloads.jobs import Workload as Workload
from jaxserve.workloads.jobs import ideal_prefix_hit as ideal_prefix_hit
from jaxserve.workloads.jobs import token_ids as token_ids
from jaxserve.workloads.jobs import with_arrivals as with_arrivals
from jaxserve.workloads.named import WORKLOADS as WORKLOADS
from jaxserve.workloads.named import make_workload as make_workload
from jaxserve.workloads.named import trace_path as trace_path
