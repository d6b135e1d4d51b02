// SPDX-License-Identifier: GPL-2.0-only OR MIT
// Channels of Linux 6.1. Writes of recovery and preemption still go to the registers.
// kernel: 6.1
// file: nvkm/engine/fifo/gpfifogf100.c
// hook: gmpv_nv_channel_open
// hook: gmpv_nv_memory_zero
// hook: gmpv_nv_channel_bind
// hook: gmpv_nv_channel_unbind
// hook: gmpv_nv_channel_enable
// hook: gmpv_nv_channel_disable

@@
@@
 #include "changf100.h"
+#include "gmpv/hooks.h"

@@
@@
 gf100_fifo_gpfifo_new(...)
 {
 <...
+	ret = gmpv_nv_channel_open(fifo->base.engine.subdev.device, chan->base.chid);
+	if (ret)
+		return ret;
	args->v0.chid = chan->base.chid;
 ...>
 }

// The page that a channel's user writes to.
@@
@@
 gf100_fifo_gpfifo_new(...)
 {
 <...
+	if (!gmpv_nv_memory_zero(fifo->base.engine.subdev.device, fifo->user.mem, usermem, 0x1000))
	for (i = 0; i < 0x1000; i += 4)
		nvkm_wo32(fifo->user.mem, usermem + i, 0x00000000);
 ...>
 }

@@
@@
 gf100_fifo_gpfifo_init(...)
 {
 <...
+	if (!gmpv_nv_channel_bind(device, chan->base.chid, chan->base.inst->addr))
	nvkm_wr32(device, 0x003000 + coff, 0xc0000000 | addr);
 ...>
 }

@@
@@
 gf100_fifo_gpfifo_init(...)
 {
 <...
+	if (!gmpv_nv_channel_enable(device, chan->base.chid))
	nvkm_wr32(device, 0x003004 + coff, 0x001f0001);
 ...>
 }

@@
@@
 gf100_fifo_gpfifo_fini(...)
 {
 <...
+	if (!gmpv_nv_channel_disable(device, chan->base.chid))
	nvkm_mask(device, 0x003004 + coff, 0x00000001, 0x00000000);
 ...>
 }

@@
@@
 gf100_fifo_gpfifo_fini(...)
 {
 <...
+	if (!gmpv_nv_channel_unbind(device, chan->base.chid))
	nvkm_wr32(device, 0x003000 + coff, 0x00000000);
 ...>
 }
