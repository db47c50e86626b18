"""The one home of PyTorch's private APIs.

Every other module of the package stays on public names. Each function here says why the private
name is needed; all were tried on torch 2.13.0, and none of them is known to differ on 2.11 to 2.15
unless its docstring says so. Imports stand inside the functions because `torch._dynamo` and
`torch._inductor` take seconds to load and the smart cast ops must not pay for them.
"""
