"""The errors that lynnc raises. A message is one sentence: what was wrong, where, and what to do."""


class LynncError(Exception):
    """Base of all errors a user can cause or mend; the command line prints it and exits with ``exit_code``."""

    exit_code = 2


class ModelError(LynncError):
    """A model file or a published configuration that cannot be understood or built."""


class TargetError(LynncError):
    """An unknown target or device, or one that the installed tools cannot serve."""


class OptionError(LynncError):
    """An option that names nothing known, such as a pass or a knob."""


class GraphError(LynncError):
    """A graph that breaks a rule of the intermediate representation: our own mistake, named with the pass."""

    exit_code = 1


class CompileError(LynncError):
    """A kernel that Triton or ptxas refused; names template, op and target."""

    exit_code = 1


class PlanError(LynncError):
    """A plan folder that is missing, damaged, of another schema or for another architecture."""


class RecordError(LynncError):
    """A file of measurements or of a tuning run that is damaged, or that is about another model, plan or device."""


class StorageError(LynncError):
    """The storage of a tuning run was lost while it was in use."""


class PeerError(LynncError):
    """Another engine that was to be measured beside ours and could not be run, or said nothing that is understood."""

    exit_code = 1


class OutputError(LynncError):
    """An output or store folder that cannot be written, or that exists already."""


class WeightError(LynncError):
    """A checkpoint or packed folder that is missing, damaged, contradictory or not understood."""


class DeviceError(LynncError):
    """A GPU that is missing, lost or too small, or a launch that it refused."""

    exit_code = 1
