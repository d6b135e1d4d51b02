// SPDX-License-Identifier: GPL-2.0-only OR MIT
// The end of a channel since Linux 6.2, if it has a number.
// kernel: 6.12
// file: nvkm/engine/fifo/chan.c
// hook: gmpv_nv_channel_close

@@
@@
 #include "chan.h"
+#include "gmpv/hooks.h"

@@
@@
 nvkm_chan_del(...)
 {
 <...
+	if (chan->id >= 0)
+		gmpv_nv_channel_close(chan->cgrp->runl->fifo->engine.subdev.device, chan->id);
	if (chan->func->ramfc->clear)
		chan->func->ramfc->clear(chan);
 ...>
 }
