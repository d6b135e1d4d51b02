// SPDX-License-Identifier: GPL-2.0-only OR MIT
// The end of a channel of Linux 6.1, if it has a number.
// kernel: 6.1
// file: nvkm/engine/fifo/chan.c
// hook: gmpv_nv_channel_close

@@
@@
 #include "chan.h"
+#include "gmpv/hooks.h"

@@
statement S, S1;
@@
 nvkm_fifo_chan_dtor(...)
 {
 ... when != S
+	if (!list_empty(&chan->head))
+		gmpv_nv_channel_close(fifo->engine.subdev.device, chan->chid);
 S1
 ... when any
 }
