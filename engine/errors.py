"""Errors that a user can act on. Each message names the field, its value, the limit and the remedy."""


class KvseekError(Exception):
    """Base of every error that kvseek raises on purpose."""


class ConfigError(KvseekError, ValueError):
    """A configuration field is unknown, missing or out of range."""


class EngineDirectoryError(KvseekError):
    """An engine directory is incomplete, corrupt, or of another format version."""


class RequestError(KvseekError, ValueError):
    """A request that cannot be served as it stands. Other requests are not affected."""


class CapacityError(KvseekError, MemoryError):
    """The KV cache cannot hold what was asked for."""


class KernelError(KvseekError, RuntimeError):
    """Compiled kernels are missing, or do not support a shape."""
