//! The worker's system call filter.
//!
//! Several filters are installed, and the kernel uses the strictest result. One filter returns `EPERM` for calls that
//! libraries try but do not need, and one returns `ENOSYS` for `clone3`. Another filter allows a list of calls, some of
//! them conditionally, and sends `SIGSYS` for all others.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};

use super::addresses::{Addresses, LIMIT};

/// Calls that are allowed without conditions. They affect only the process itself, its descriptors, and files that it
/// may open.
const ALLOWED: &[i64] = &[
    // Descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup2,
    libc::SYS_dup3,
    libc::SYS_flock,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_pipe,
    libc::SYS_pipe2,
    libc::SYS_memfd_create,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    // Files.
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    // Sockets of the worker; the driver listens on one. `sendmsg` is safe, because the socket types that a worker can
    // create reject a destination address in a message.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_mbind,
    libc::SYS_get_mempolicy,
    libc::SYS_set_mempolicy,
    libc::SYS_membarrier,
    // Threads, signals and time.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigpending,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_pause,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_time,
    libc::SYS_times,
    libc::SYS_wait4,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Information.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getpgrp,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_getcpu,
    libc::SYS_getpriority,
    libc::SYS_capget,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
];

/// Calls that fail with `EPERM`. Libraries try these calls, for example to create a cache or to prepare devices.
const REFUSED: &[i64] = &[
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_creat,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_chown,
    libc::SYS_fchown,
    libc::SYS_lchown,
    libc::SYS_fchownat,
    libc::SYS_umask,
    libc::SYS_utimensat,
    libc::SYS_setpriority,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setaffinity,
    libc::SYS_setrlimit,
    libc::SYS_inotify_init,
    libc::SYS_inotify_init1,
];

/// Operations of `prctl` that set or return the thread's name, or set its timer slack or the names of memory areas.
const PRCTL: [libc::c_int; 4] = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_TIMERSLACK, libc::PR_SET_VMA];
/// Commands of `fcntl` that make the kernel send signals to a process of the caller's choice.
const SIGNAL_COMMANDS: [i32; 3] = [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX];
/// Value of `F_SETSIG`, which the crate `libc` does not define.
const F_SETSIG: i32 = 10;
/// Value of `F_SETOWN_EX`, which the crate `libc` does not define.
const F_SETOWN_EX: i32 = 15;
/// `ioctl` requests that make the kernel send signals for sockets (`FIOSETOWN`, `SIOCSPGRP`), and requests that
/// simulate input at a terminal (`TIOCSTI`, `TIOCLINUX`).
const SIGNAL_REQUESTS: [i32; 4] = [0x8901, 0x8902, 0x5412, 0x541c];
/// Flags of `clone` that create namespaces.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP;

/// Rules, keyed by system call. A call matches if one of its rules matches, or if it has no rules.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A condition: argument index, comparison and value.
type Condition = (u8, SeccompCmpOp, u64);

fn rule(conditions: &[Condition]) -> Result<SeccompRule, BackendError> {
    let made = conditions.iter().map(|(argument, comparison, value)| {
        SeccompCondition::new(*argument, SeccompCmpArgLen::Qword, comparison.clone(), *value)
    });
    SeccompRule::new(made.collect::<Result<_, _>>()?)
}

/// Creates a rule for arguments whose upper 32 bits the kernel ignores. It compares only the lower 32 bits.
fn short_rule(conditions: &[Condition]) -> Result<SeccompRule, BackendError> {
    let made = conditions.iter().map(|(argument, comparison, value)| {
        SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, comparison.clone(), *value)
    });
    SeccompRule::new(made.collect::<Result<_, _>>()?)
}

/// Returns the rules for calls that are allowed, or that another filter makes fail.
fn allowed(addresses: Addresses) -> Result<Rules, BackendError> {
    use SeccompCmpOp::{Eq, Ge, MaskedEq, Ne};
    let mut rules: Rules = ALLOWED.iter().chain(REFUSED).map(|call| (*call, Vec::new())).collect();
    let own = u64::from(std::process::id());
    // Mappings below the limit must not change.
    let above = (0, Ge, LIMIT);
    let fixed = libc::MAP_FIXED as u64;
    let elsewhere = rule(&[(3, MaskedEq(fixed), 0)])?;
    rules.insert(libc::SYS_mmap, vec![elsewhere, rule(std::slice::from_ref(&above))?]);
    for call in [libc::SYS_munmap, libc::SYS_mprotect, libc::SYS_madvise] {
        rules.insert(call, vec![rule(std::slice::from_ref(&above))?]);
    }
    let moved = libc::MREMAP_FIXED as u64;
    let elsewhere = rule(&[above.clone(), (3, MaskedEq(moved), 0)])?;
    rules.insert(libc::SYS_mremap, vec![elsewhere, rule(&[above, (4, Ge, LIMIT)])?]);

    // Allow new threads. Reject new processes and namespaces.
    let thread = (libc::CLONE_THREAD | libc::CLONE_VM) as u64;
    let own_spaces = (0, MaskedEq(NAMESPACES as u64), 0);
    rules.insert(libc::SYS_clone, vec![rule(&[(0, MaskedEq(thread), thread), own_spaces])?, process_clone()?]);
    rules.insert(libc::SYS_clone3, Vec::new());
    // Allow signals only to the process itself. Reject commands and requests that let the kernel send signals to a
    // chosen process or simulate input.
    let commands = SIGNAL_COMMANDS.map(|command| (1, Ne, command as u64));
    rules.insert(libc::SYS_fcntl, vec![short_rule(&commands)?]);
    let requests = SIGNAL_REQUESTS.map(|request| (1, Ne, request as u64));
    rules.insert(libc::SYS_ioctl, vec![short_rule(&requests)?]);
    rules.insert(libc::SYS_tgkill, vec![short_rule(&[(0, Eq, own)])?]);
    rules.insert(libc::SYS_kill, vec![short_rule(&[(0, Eq, own)])?]);
    rules.insert(libc::SYS_rt_sigaction, vec![short_rule(&[(0, Ne, libc::SIGSYS as u64)])?]);
    let itself = [0, own].map(|process| short_rule(&[(0, Eq, process)]));
    rules.insert(libc::SYS_prlimit64, itself.into_iter().collect::<Result<_, _>>()?);
    let named = PRCTL.map(|name| short_rule(&[(0, Eq, name as u64)]));
    rules.insert(libc::SYS_prctl, named.into_iter().collect::<Result<_, _>>()?);

    // `send` is `sendto` without an address.
    rules.insert(libc::SYS_sendto, vec![rule(&[(4, Eq, 0)])?]);
    let connects: Vec<_> = addresses.all().collect();
    if !connects.is_empty() {
        let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64;
        rules.insert(libc::SYS_socket, vec![short_rule(&[(0, Eq, libc::AF_UNIX as u64), (1, Eq, kind)])?]);
        let connects = connects.iter().map(|kept| rule(&[(1, Eq, kept.pointer), (2, Eq, kept.length)]));
        rules.insert(libc::SYS_connect, connects.collect::<Result<_, _>>()?);
    }
    Ok(rules)
}

/// Returns a rule that matches the creation of a process, which the filter from [`refused`] makes fail with `EPERM`.
fn process_clone() -> Result<SeccompRule, BackendError> {
    rule(&[(0, SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64), 0)])
}

/// Returns the rules for calls that fail with `EPERM`.
fn refused() -> Result<Rules, BackendError> {
    let mut rules: Rules = REFUSED.iter().map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_clone, vec![process_clone()?]);
    Ok(rules)
}

fn program(rules: Rules, otherwise: SeccompAction, matched: SeccompAction) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, otherwise, matched, TargetArch::x86_64)?.try_into()
}

/// Returns the filters in the order of their installation.
fn programs(addresses: Addresses) -> Result<[BpfProgram; 3], BackendError> {
    let refusal = SeccompAction::Errno(libc::EPERM as u32);
    // The C library starts threads with `clone` if `clone3` is missing. A filter cannot see the flags of `clone3`.
    let missing = SeccompAction::Errno(libc::ENOSYS as u32);
    let newer = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    Ok([
        program(refused()?, SeccompAction::Allow, refusal)?,
        program(newer, SeccompAction::Allow, missing)?,
        program(allowed(addresses)?, SeccompAction::Trap, SeccompAction::Allow)?,
    ])
}

/// Installs the filters permanently in all threads.
pub(super) fn install(addresses: Addresses) -> Result<(), String> {
    // Create all filters first, because the last one forbids installing more.
    let programs = programs(addresses).map_err(|error| error.to_string())?;
    for program in &programs {
        apply_filter_all_threads(program).map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
