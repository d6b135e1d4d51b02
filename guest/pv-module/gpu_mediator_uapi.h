/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Requests of programs to /dev/gpu-mediator: memory of the card that several channels map, and the virtual machine's
 * part of the card. The interface follows shmget(2), shmat(2), shmdt(2) and shmctl(2).
 *
 * Flags, commands and questions are those of gpu_mediator_abi.h. A segment that a file has attached is detached when
 * the file is closed or the channel dies. Errors are those of errno(3): EACCES (the process is not the owner's, or
 * the mode forbids it), ENOENT (no such segment or channel), EEXIST, ENOSPC (a limit of the virtual machine),
 * EOPNOTSUPP (the device does not offer it), EINVAL, EIO.
 */
#ifndef GPU_MEDIATOR_UAPI_H
#define GPU_MEDIATOR_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Finds or creates a segment. */
struct gpu_mediator_share_get {
	__u64 key;		/* 0: nobody finds it by a key */
	__u64 bytes;		/* rounded up to 4096 */
	__u32 flags;		/* GMPV_SHARE_CREATE, _EXCLUSIVE, _ABROAD */
	__u32 mode;		/* in this guest: 0600 the owner, 0006 all others; counts when the guest meets it first */
	__u32 abroad;		/* other virtual machines: GMPV_SHARE_MODE_*; counts when the segment is made */
	__u32 id;		/* out */
};

/* Maps a segment for a channel that this process created. */
struct gpu_mediator_share_attach {
	__u32 id;
	__u32 channel;		/* what nouveau's CHANNEL_ALLOC has returned */
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
	__u32 command;		/* GMPV_SHARE_CONTROL_*; SET_MODE sets what other virtual machines may */
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
 * Importance of keeping the VRAM of a range of a channel's address space on the card. It applies to the memory that
 * is mapped there now, until its owner frees it.
 */
struct gpu_mediator_priority {
	__u64 address;
	__u64 bytes;
	__u32 channel;
	__s32 priority;		/* 0 is what all memory has at first; higher stays longer */
	__u64 reached;		/* out: bytes of VRAM that were found there */
};

#define GPU_MEDIATOR_SHARE_GET		_IOWR('M', 0x60, struct gpu_mediator_share_get)
#define GPU_MEDIATOR_SHARE_ATTACH	_IOWR('M', 0x61, struct gpu_mediator_share_attach)
#define GPU_MEDIATOR_SHARE_DETACH	_IOW('M', 0x62, struct gpu_mediator_share_detach)
#define GPU_MEDIATOR_SHARE_CONTROL	_IOWR('M', 0x63, struct gpu_mediator_share_control)
#define GPU_MEDIATOR_QUERY		_IOWR('M', 0x64, struct gpu_mediator_query)
#define GPU_MEDIATOR_PRIORITY		_IOWR('M', 0x65, struct gpu_mediator_priority)

#endif
