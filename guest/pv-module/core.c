// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * gpu_mediator_pv: the guest's part of gpu-mediator's paravirtual interface.
 *
 * Finds the interface of a virtual GPU through its PCI capability, and implements the protocol (queue.c). Provides page
 * tables (tables.c) and channels (channels.c) to a GPU driver, and a device node (node.c) to programs.
 */

#include <linux/debugfs.h>
#include <linux/idr.h>
#include <linux/io.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#include "priv.h"

bool gmpv_naive;
module_param_named(naive, gmpv_naive, bool, 0444);
MODULE_PARM_DESC(naive, "one operation a call and one entry an operation, for comparison (default: no)");

unsigned int gmpv_spin_us = 5;
module_param_named(spin_us, gmpv_spin_us, uint, 0644);
MODULE_PARM_DESC(spin_us, "how long the ring is looked at before the device is asked (microseconds, default: 5)");

static unsigned int allowed = ~0u;
module_param_named(features, allowed, uint, 0444);
MODULE_PARM_DESC(features, "mask of the features that are used where they are offered (default: all)");

#define FEATURES (GMPV_FEATURE_TABLES | GMPV_FEATURE_CHANNELS | GMPV_FEATURE_MEMORY | GMPV_FEATURE_PRIORITY | \
		  GMPV_FEATURE_SHARE | GMPV_FEATURE_SHARE_ABROAD | GMPV_FEATURE_QUERY)

static DEFINE_IDA(numbers);
static struct dentry *debugfs_root;

static void release(struct kref *kref)
{
	kfree(container_of(kref, struct gmpv, kref));
}

void gmpv_get(struct gmpv *pv)
{
	kref_get(&pv->kref);
}

void gmpv_put(struct gmpv *pv)
{
	kref_put(&pv->kref, release);
}

bool gmpv_has(const struct gmpv *pv, u32 features)
{
	return pv && (pv->features & features) == features;
}
EXPORT_SYMBOL_GPL(gmpv_has);

static int find_capability(struct pci_dev *pdev, struct gmpv_capability *capability)
{
	u32 word;
	u8 at, i;

	for (at = pci_find_capability(pdev, PCI_CAP_ID_VNDR); at;
	     at = pci_find_next_capability(pdev, at, PCI_CAP_ID_VNDR)) {
		for (i = 0; i < sizeof(*capability); i += sizeof(word)) {
			pci_read_config_dword(pdev, at + i, &word);
			/* Configuration space and the capability are little-endian. */
			((__le32 *)capability)[i / sizeof(word)] = cpu_to_le32(word);
		}
		if (capability->length >= sizeof(*capability) &&
		    capability->signature == cpu_to_le32(GMPV_SIGNATURE))
			return 0;
	}
	return -ENODEV;
}

static int counters_show(struct seq_file *seq, void *unused)
{
	struct gmpv *pv = seq->private;

	seq_printf(seq, "calls %lld\n", (s64)atomic64_read(&pv->counters.calls));
	seq_printf(seq, "operations %lld\n", (s64)atomic64_read(&pv->counters.operations));
	seq_printf(seq, "entries %lld\n", (s64)atomic64_read(&pv->counters.entries));
	seq_printf(seq, "doorbells %lld\n", (s64)atomic64_read(&pv->counters.doorbells));
	seq_printf(seq, "polls %lld\n", (s64)atomic64_read(&pv->counters.polls));
	seq_printf(seq, "failures %lld\n", (s64)atomic64_read(&pv->counters.failures));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(counters);

static int start(struct gmpv *pv)
{
	int ret = gmpv_queue_init(pv);

	if (ret)
		return ret;
	ret = gmpv_setup(pv);
	if (ret)
		return ret;
	pv->number = ida_alloc_min(&numbers, 1, GFP_KERNEL);
	if (pv->number < 0)
		return pv->number;
	ret = gmpv_node_add(pv);
	if (ret)
		ida_free(&numbers, pv->number);
	return ret;
}

struct gmpv *gmpv_attach(struct pci_dev *pdev, void __iomem *bar0)
{
	struct gmpv_capability capability;
	struct gmpv *pv;
	u32 offset;
	int ret;

	if (find_capability(pdev, &capability))
		return NULL;
	offset = le32_to_cpu(capability.offset);
	if (capability.version_major != GMPV_VERSION_MAJOR || capability.bar != 0 || offset % 4 ||
	    offset > pci_resource_len(pdev, 0) || GMPV_REGISTER_BYTES > pci_resource_len(pdev, 0) - offset) {
		dev_warn(&pdev->dev, "gpu-mediator: version %u.%u in BAR%u at %#x cannot be used\n",
			 capability.version_major, capability.version_minor, capability.bar, offset);
		return NULL;
	}
	pv = kzalloc(sizeof(*pv), GFP_KERNEL);
	if (!pv)
		return NULL;
	kref_init(&pv->kref);
	pv->pdev = pdev;
	pv->dev = &pdev->dev;
	pv->regs = bar0 + offset;
	spin_lock_init(&pv->lock);
	mutex_init(&pv->tables_lock);
	mutex_init(&pv->users_lock);
	xa_init_flags(&pv->tables, XA_FLAGS_ALLOC1);
	xa_init(&pv->bindings);
	xa_init(&pv->channels);
	xa_init(&pv->segments);
	INIT_LIST_HEAD(&pv->files);
	pv->features = readl(pv->regs + GMPV_REGISTER_FEATURES) & FEATURES & allowed;
	ret = readl(pv->regs + GMPV_REGISTER_SIGNATURE) == GMPV_SIGNATURE ? start(pv) : -ENODEV;
	if (ret) {
		dev_warn(&pdev->dev, "gpu-mediator: the interface cannot be used (%d)\n", ret);
		writel(GMPV_STATUS_RESET, pv->regs + GMPV_REGISTER_STATUS);
		gmpv_queue_free(pv);
		gmpv_put(pv);
		return NULL;
	}
	pv->debugfs = debugfs_create_dir(pci_name(pdev), debugfs_root);
	debugfs_create_file("counters", 0444, pv->debugfs, pv, &counters_fops);
	dev_info(&pdev->dev, "gpu-mediator: interface %u.%u, features %#x, %s\n", capability.version_major,
		 capability.version_minor, pv->features, gmpv_naive ? "naive" : "multicall");
	return pv;
}
EXPORT_SYMBOL_GPL(gmpv_attach);

void gmpv_detach(struct gmpv *pv)
{
	if (!pv)
		return;
	debugfs_remove_recursive(pv->debugfs);
	ida_free(&numbers, pv->number);
	gmpv_node_remove(pv);
	gmpv_channels_free(pv);
	gmpv_tables_free(pv);
	writel(GMPV_STATUS_RESET, pv->regs + GMPV_REGISTER_STATUS);
	/* The write returns when the reset is complete. The queue's memory is then no longer in use. */
	readl(pv->regs + GMPV_REGISTER_STATUS);
	gmpv_queue_free(pv);
	gmpv_put(pv);
}
EXPORT_SYMBOL_GPL(gmpv_detach);

int gmpv_resume(struct gmpv *pv)
{
	int ret;

	if (!pv || readl(pv->regs + GMPV_REGISTER_STATUS) == GMPV_STATUS_READY)
		return 0;
	ret = gmpv_setup(pv);
	if (ret)
		return ret;
	gmpv_channels_forget(pv);
	gmpv_tables_restore(pv);
	return 0;
}
EXPORT_SYMBOL_GPL(gmpv_resume);

int gmpv_memory_fill(struct gmpv *pv, u64 address, u64 bytes, u32 value)
{
	int ret = 0;

	while (bytes && !ret) {
		u64 part = min_t(u64, bytes, GMPV_MAX_MEMORY_BYTES);
		struct gmpv_memory_fill body = {
			.address = cpu_to_le64(address), .bytes = cpu_to_le64(part), .value = cpu_to_le32(value),
		};

		ret = gmpv_queue_run(pv, GMPV_OP_MEMORY_FILL, 0, &body, sizeof(body));
		address += part;
		bytes -= part;
	}
	return ret;
}
EXPORT_SYMBOL_GPL(gmpv_memory_fill);

static int __init gmpv_module_init(void)
{
	debugfs_root = debugfs_create_dir("gpu_mediator_pv", NULL);
	return 0;
}

static void __exit gmpv_module_exit(void)
{
	debugfs_remove_recursive(debugfs_root);
}

module_init(gmpv_module_init);
module_exit(gmpv_module_exit);
MODULE_DESCRIPTION("The guest's side of gpu-mediator's paravirtual interface");
MODULE_LICENSE("Dual MIT/GPL");
