use super::super::addresses::{ADDRESS, Kept};
use super::*;

/// `AUDIT_ARCH_X86_64`.
const ARCHITECTURE: u32 = 0xc000_003e;
const OWNER: Kept = Kept { pointer: ADDRESS, length: 20 };
const DAEMON: Kept = Kept { pointer: ADDRESS + 256, length: 30 };

/// The kernel's decision about a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Kill,
    Trap,
    Fail(u32),
    Allow,
}

/// Runs a filter program like the kernel.
fn run(program: &BpfProgram, call: i64, arguments: &[u64]) -> Verdict {
    let mut data = vec![call as u32, ARCHITECTURE, 0, 0];
    data.extend((0..6).flat_map(|n| {
        let word = arguments.get(n).copied().unwrap_or(0);
        [word as u32, (word >> 32) as u32]
    }));
    let (mut at, mut register) = (0, 0u32);
    loop {
        let step = &program[at];
        at += 1;
        let mut jump = |holds: bool| at += usize::from(if holds { step.jt } else { step.jf });
        match step.code {
            0x20 => register = data[step.k as usize / 4],
            0x54 => register &= step.k,
            0x05 => at += step.k as usize,
            0x15 => jump(register == step.k),
            0x25 => jump(register > step.k),
            0x35 => jump(register >= step.k),
            0x06 => {
                return match step.k & 0xffff_0000 {
                    0x7fff_0000 => Verdict::Allow,
                    0x0005_0000 => Verdict::Fail(step.k & 0xffff),
                    0x0003_0000 => Verdict::Trap,
                    _ => Verdict::Kill,
                };
            }
            other => panic!("instruction {other:#x}"),
        }
    }
}

/// Returns the strictest decision of all programs.
fn verdict(kept: &[Kept], call: i64, arguments: &[u64]) -> Verdict {
    let programs = programs(Addresses::of(kept)).expect("valid");
    programs.iter().map(|program| run(program, call, arguments)).min().expect("programs")
}

fn of(call: i64, arguments: &[u64]) -> Verdict {
    verdict(&[OWNER, DAEMON], call, arguments)
}

#[test]
fn calls_of_the_driver_pass_and_others_trap() {
    for call in [libc::SYS_ioctl, libc::SYS_openat, libc::SYS_futex, libc::SYS_read, libc::SYS_eventfd2] {
        assert_eq!(of(call, &[7; 6]), Verdict::Allow);
    }
    for call in ALLOWED {
        assert_eq!(of(*call, &[]), Verdict::Allow, "{call}");
    }
    let forbidden = [
        libc::SYS_execve,
        libc::SYS_ptrace,
        libc::SYS_mount,
        libc::SYS_bpf,
        libc::SYS_bind,
        libc::SYS_listen,
        libc::SYS_process_vm_readv,
        libc::SYS_pidfd_send_signal,
        libc::SYS_io_uring_setup,
        libc::SYS_remap_file_pages,
        libc::SYS_pkey_mprotect,
        libc::SYS_shmat,
        libc::SYS_mseal,
        libc::SYS_seccomp,
        // A number of the x32 ABI, and an unassigned number.
        libc::SYS_read | 0x4000_0000,
        5000,
    ];
    for call in forbidden {
        assert_eq!(of(call, &[]), Verdict::Trap, "{call}");
    }
}

#[test]
fn memory_of_the_addresses_stays_as_it_is() {
    let fixed = libc::MAP_FIXED as u64;
    for (call, arguments) in [
        (libc::SYS_mmap, [0, 1 << 20, 3, fixed, 0, 0]),
        (libc::SYS_mmap, [ADDRESS, 4096, 3, fixed | 0x22, 0, 0]),
        (libc::SYS_munmap, [0, 1 << 40, 0, 0, 0, 0]),
        (libc::SYS_munmap, [LIMIT - 1, 4096, 0, 0, 0, 0]),
        (libc::SYS_mprotect, [ADDRESS, 4096, 3, 0, 0, 0]),
        (libc::SYS_madvise, [ADDRESS, 4096, 4, 0, 0, 0]),
        (libc::SYS_mremap, [ADDRESS, 4096, 4096, 1, 0, 0]),
        (libc::SYS_mremap, [1 << 32, 4096, 4096, 3, ADDRESS, 0]),
    ] {
        assert_eq!(of(call, &arguments), Verdict::Trap, "{call} {arguments:x?}");
    }
    for (call, arguments) in [
        (libc::SYS_mmap, [0, 1 << 20, 3, 0x22, 0, 0]),
        (libc::SYS_mmap, [LIMIT, 4096, 3, fixed | 0x22, 0, 0]),
        (libc::SYS_mmap, [1 << 40, 4096, 3, fixed, 0, 0]),
        (libc::SYS_munmap, [LIMIT, 4096, 0, 0, 0, 0]),
        (libc::SYS_mremap, [1 << 32, 4096, 8192, 1, 0, 0]),
        (libc::SYS_mremap, [1 << 32, 4096, 8192, 3, 1 << 33, 0]),
    ] {
        assert_eq!(of(call, &arguments), Verdict::Allow, "{call} {arguments:x?}");
    }
}

#[test]
fn sockets_reach_owner_and_daemon_only() {
    let kind = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64;
    assert_eq!(of(libc::SYS_socket, &[1, kind, 0]), Verdict::Allow);
    for arguments in [[2, 1, 0], [1, libc::SOCK_DGRAM as u64, 0], [1, libc::SOCK_STREAM as u64, 0], [16, 3, 0]] {
        assert_eq!(of(libc::SYS_socket, &arguments), Verdict::Trap, "{arguments:?}");
    }
    for kept in [OWNER, DAEMON] {
        assert_eq!(of(libc::SYS_connect, &[5, kept.pointer, kept.length]), Verdict::Allow);
    }
    for arguments in [
        [5, ADDRESS + 1, 20],
        [5, ADDRESS, 30],
        [5, DAEMON.pointer, 20],
        [5, ADDRESS, 19],
        [5, 1 << 40, 20],
        [5, ADDRESS | 1 << 32, 20],
    ] {
        assert_eq!(of(libc::SYS_connect, &arguments), Verdict::Trap, "{arguments:?}");
    }
    assert_eq!(of(libc::SYS_sendto, &[4, 1, 1, 0, 0, 0]), Verdict::Allow);
    assert_eq!(of(libc::SYS_sendto, &[4, 1, 1, 0, 1 << 40, 20]), Verdict::Trap);
    // Without addresses, the worker cannot connect to any socket.
    assert_eq!(verdict(&[], libc::SYS_socket, &[1, kind, 0]), Verdict::Trap);
    assert_eq!(verdict(&[], libc::SYS_connect, &[5, ADDRESS, 20]), Verdict::Trap);
}

#[test]
fn threads_start_and_processes_and_name_spaces_do_not() {
    let thread = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_FILES) as u64;
    assert_eq!(of(libc::SYS_clone, &[thread]), Verdict::Allow);
    assert_eq!(of(libc::SYS_clone3, &[1 << 40, 88]), Verdict::Fail(libc::ENOSYS as u32));
    for flags in [17, libc::CLONE_VM as u64, (libc::CLONE_VM | libc::CLONE_VFORK) as u64] {
        assert_eq!(of(libc::SYS_clone, &[flags]), Verdict::Fail(libc::EPERM as u32), "{flags:x}");
    }
    assert_eq!(of(libc::SYS_fork, &[]), Verdict::Fail(libc::EPERM as u32));
    assert_eq!(of(libc::SYS_clone, &[thread | libc::CLONE_NEWNET as u64]), Verdict::Trap);
    assert_eq!(of(libc::SYS_unshare, &[libc::CLONE_NEWUSER as u64]), Verdict::Trap);
}

#[test]
fn signals_and_limits_concern_the_process_alone() {
    let own = u64::from(std::process::id());
    for call in [libc::SYS_kill, libc::SYS_tgkill] {
        assert_eq!(of(call, &[own, 9, 9]), Verdict::Allow);
        assert_eq!(of(call, &[1, 9, 9]), Verdict::Trap);
        // The process group, and all processes.
        assert_eq!(of(call, &[0, 9, 9]), Verdict::Trap);
        assert_eq!(of(call, &[u64::MAX, 9, 9]), Verdict::Trap);
    }
    for (call, command) in
        [(libc::SYS_fcntl, 8), (libc::SYS_fcntl, 10), (libc::SYS_fcntl, 15), (libc::SYS_ioctl, 0x8901)]
    {
        assert_eq!(of(call, &[3, command, 1]), Verdict::Trap);
        assert_eq!(of(call, &[3, command | 1 << 32, 1]), Verdict::Trap);
    }
    assert_eq!(of(libc::SYS_fcntl, &[3, libc::F_DUPFD_CLOEXEC as u64, 1024]), Verdict::Allow);
    assert_eq!(of(libc::SYS_ioctl, &[3, 0xc020_462a, 1]), Verdict::Allow);
    assert_eq!([0, own].map(|pid| of(libc::SYS_prlimit64, &[pid, 7, 0, 1])), [Verdict::Allow; 2]);
    assert_eq!(of(libc::SYS_prlimit64, &[1, 7, 0, 1]), Verdict::Trap);
    assert_eq!(of(libc::SYS_sched_setaffinity, &[1, 8, 1]), Verdict::Fail(libc::EPERM as u32));
    assert_eq!(of(libc::SYS_rt_sigaction, &[libc::SIGTERM as u64, 0, 0, 8]), Verdict::Allow);
    assert_eq!(of(libc::SYS_rt_sigaction, &[libc::SIGSYS as u64, 0, 0, 8]), Verdict::Trap);
    assert_eq!(of(libc::SYS_prctl, &[libc::PR_SET_NAME as u64, 1]), Verdict::Allow);
    assert_eq!(of(libc::SYS_prctl, &[libc::PR_SET_DUMPABLE as u64, 0]), Verdict::Trap);
}
