"""One page about a plan: what it launches, what binds it, what was measured, what tuning gained.

In: a ``Plan``, a ``Device``, and maybe measurements and a tuning summary. Out: one HTML file that needs nothing else.
"""
