"""The kernel table: one record joins template, ops, knobs, constraints and arguments of a kernel."""
