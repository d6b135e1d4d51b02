/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Requests from programs to /dev/gpu-mediator, for card memory that is mapped by several channels, and for the virtual
 * machine's part of the card. The interface follows shmget(2), shmat(2), shmdt(2) and shmctl(2).
 *
 * Flags, commands and queries are those in gpu_mediator_abi.h. A segment that was attached through a file is detached
 * when the file is closed or the channel is destroyed. Errors are those of errno(3): EACCES (the process does not
 * belong to the owner, or the mode forbids the request), ENOENT (no such segment or channel), EEXIST, ENOSPC (a limit
 * of the virtual machine), EOPNOTSUPP (not supported by the device), EINVAL, EIO.
 */
#ifndef GPU_MEDIATOR_UAPI_H
#define GPU_MEDIATOR_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Finds or creates a segment. */
struct gpu_mediator_share_get {
	__u64 key;		/* 0 for a segment that cannot be found by a key */
	__u64 bytes;		/* rounded up to 4096 */
	__u32 flags;		/* GMPV_SHARE_CREATE, _EXCLUSIVE, _ABROAD */
	__u32 mode;		/* in this guest: 0600 for the owner, 0006 for others; set at the guest's first use */
	__u32 abroad;		/* for other virtual machines: GMPV_SHARE_MODE_*; set when the segment is created */
	__u32 id;		/* out */
};

/* Maps a segment for a channel that this process created. */
struct gpu_mediator_share_attach {
	__u32 id;
	__u32 channel;		/* as returned by nouveau's CHANNEL_ALLOC */
	__u32 flags;		/* GMPV_SHARE_READ_ONLY, or 0 */
	__u32 reserved;		/* 0 */
	__u64 address;		/* out: in the channel's address space */
};

struct gpu_mediator_share_detach {
	__u32 id;
	__u32 channel;
};

struct gpu_mediator_share_control {
	__u32 id;
	__u32 command;		/* GMPV_SHARE_CONTROL_*; SET_MODE sets the mode for other virtual machines */
	__u32 argument;
	__u32 reserved;		/* 0 */
	__u64 value;		/* out */
};

struct gpu_mediator_query {
	__u32 what;		/* GMPV_QUERY_* */
	__u32 reserved;		/* 0 */
	__u64 value;		/* out */
};

/*
 * Priority for keeping the VRAM of a range of a channel's address space on the card. It applies to the memory that is
 * currently mapped in the range, until the memory's owner frees it.
 */
struct gpu_mediator_priority {
	__u64 address;
	__u64 bytes;
	__u32 channel;
	__s32 priority;		/* initially 0; memory with a higher priority stays longer */
	__u64 reached;		/* out: number of bytes of VRAM found in the range */
};

#define GPU_MEDIATOR_SHARE_GET		_IOWR('M', 0x60, struct gpu_mediator_share_get)
#define GPU_MEDIATOR_SHARE_ATTACH	_IOWR('M', 0x61, struct gpu_mediator_share_attach)
#define GPU_MEDIATOR_SHARE_DETACH	_IOW('M', 0x62, struct gpu_mediator_share_detach)
#define GPU_MEDIATOR_SHARE_CONTROL	_IOWR('M', 0x63, struct gpu_mediator_share_control)
#define GPU_MEDIATOR_QUERY		_IOWR('M', 0x64, struct gpu_mediator_query)
#define GPU_MEDIATOR_PRIORITY		_IOWR('M', 0x65, struct gpu_mediator_priority)

#endif
