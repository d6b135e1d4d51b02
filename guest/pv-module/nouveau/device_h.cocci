// SPDX-License-Identifier: GPL-2.0-only OR MIT
// A device remembers its paravirtual interface.
// file: include/nvkm/core/device.h
// hook: struct gmpv

@@
@@
 struct nvkm_device {
+	struct gmpv *gmpv;
+	bool gmpv_known;
	...
 };
