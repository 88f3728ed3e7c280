"""Cross-Point Scheduling on a current vLLM: a scheduler class and a KV connector that a server is started with.

vLLM V1 restores a preempted request by recompute only. With ``scheduler.CrossPointScheduler`` and
``connector.CrossPointConnector`` a request of at most ``threshold_tokens`` tokens has its KV cache copied to host
memory and back instead. vLLM lives in an environment of its own (``env/vllm``); nothing else in this package needs it.
"""
