"""What the operating system tells and does beyond what Python promises everywhere (standard library only).

Linux has all of it, most of it as an ordinary user; macOS has some. No function here fails for want of a facility: it
takes the next best one, and returns None, or says "not verified", for what this system leaves unknown. A worker
imports these modules before torch.
"""

NOT_HERE = "not on this system"  # what tables and figures put in place of a value that cannot be had here
