__version__ = "0.1.0"

import logging

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR) # at import it asks for a kernel that nothing here needs
