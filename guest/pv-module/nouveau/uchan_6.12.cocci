// SPDX-License-Identifier: GPL-2.0-only OR MIT
// The beginning of a channel since Linux 6.2, in the process that requests it.
// kernel: 6.12
// file: nvkm/engine/fifo/uchan.c
// hook: gmpv_nv_channel_open

@@
@@
 #include "runl.h"
+#include "gmpv/hooks.h"

@@
@@
 nvkm_uchan_new(...)
 {
 <...
	chan = uchan->chan;
+	ret = gmpv_nv_channel_open(fifo->engine.subdev.device, chan->id);
+	if (ret)
+		goto done;
 ...>
 }
