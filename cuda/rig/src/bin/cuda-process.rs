//! A CUDA program that does its own process management: it forks, handles signals, starts children, and closes
//! descriptors and libraries.
//!
//! Each subcommand prints the same output as without the library, or fails.
//!
//! UNSAFETY: calls driver functions without knowing their signatures, and the C library's process and signal functions.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::{CString, c_int, c_void};
use std::fmt::Write as _;
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use cuda_rig::Cuda;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
}

/// Method of creating a child process.
#[derive(Clone, Copy, ValueEnum)]
enum Way {
    /// `fork`, which runs the libraries' `pthread_atfork` handlers.
    Fork,
    /// The raw `clone` system call.
    Clone,
}

#[derive(Subcommand)]
enum What {
    /// Forks after the driver has been initialized, and calls each function in the child, looked up in each possible
    /// way.
    Fork {
        /// Method of creating the child.
        #[arg(long, default_value = "fork")]
        way: Way,
    },
    /// Forks after the driver has been loaded but before it is initialized, and uses the card in a grandchild.
    ForkBefore,
    /// Receives SIGTERM through a signalfd. The signal is blocked before the driver is initialized. Fails if another
    /// thread does not block signals.
    Signals,
    /// Checks the limit on open files in this process and in its children, and the descriptors that a child inherits.
    Children {
        /// Memory to allocate first, in MiB.
        #[arg(long)]
        mib: u64,
    },
    /// Closes the standard descriptors, and then initializes the driver and uses the card. Writes the standard
    /// descriptors that are open afterwards to a file.
    Closed {
        /// Path of the file.
        file: String,
    },
    /// Frees almost all of its memory, in stream order and directly, and then submits work without pauses until end of
    /// file on standard input. Prints the free memory in MiB.
    Freed {
        /// Memory to free, in MiB.
        #[arg(long)]
        mib: u64,
    },
    /// Clears its environment, changes its working directory, waits for a line on standard input, and allocates memory.
    Forgets,
    /// Loads the library explicitly, initializes the driver, and closes the library while its thread runs.
    Unload,
}

/// Time limit for a child, in seconds.
// TIMEOUT: only a failing test waits this long.
const CHILD_S: u32 = 20;

/// A driver function, called with at least as many arguments as any driver function has.
type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> c_int;

/// Functions that the library replaces, functions that wait at its gate, and other functions. All need an initialized
/// driver.
const FUNCTIONS: [&str; 24] = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemAllocManaged",
    "cuMemHostAlloc",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
    "cuIpcGetMemHandle",
    "cuStreamBeginCapture_v2",
    "cuStreamDestroy_v2",
    "cuGraphLaunch",
    "cuLaunchKernel",
    "cuMemcpyDtoH_v2",
];

fn main() -> Result<()> {
    match Args::parse().what {
        What::Fork { way } => fork(way),
        What::ForkBefore => fork_before(),
        What::Signals => signals(),
        What::Children { mib } => children(mib),
        What::Closed { file } => closed(&file),
        What::Freed { mib } => freed(mib),
        What::Forgets => forgets(),
        What::Unload => unload(),
    }
}

/// Loads the driver's library through the loader. Only [`unload`] closes it.
fn library() -> Result<*mut c_void> {
    // SAFETY: every program loads this library in the same way.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    ensure!(!library.is_null(), "no libcuda.so.1");
    Ok(library)
}

fn symbol(library: *mut c_void, name: &str) -> Result<*mut c_void> {
    let name = CString::new(name)?;
    // SAFETY: the handle is valid, and the name is NUL-terminated.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    ensure!(!found.is_null(), "no {name:?}");
    Ok(found)
}

fn call(function: *mut c_void) -> c_int {
    // SAFETY: every function rejects zeros as arguments, and ignores surplus ones.
    unsafe {
        let function: Function = std::mem::transmute(function);
        function(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    }
}

/// Runs `work` in a child and returns its result. Fails if the child was killed by a signal.
fn in_child(way: Way, work: impl FnOnce() -> i32) -> Result<i32> {
    // SAFETY: the child calls the driver and the system, and exits without running the parent's code.
    let child = unsafe {
        match way {
            Way::Fork => libc::fork(),
            Way::Clone => libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32,
        }
    };
    ensure!(child >= 0, "no child: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::alarm(CHILD_S);
            libc::_exit(work());
        }
    }
    let mut status = 0;
    // SAFETY: this process created the child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    ensure!(libc::WIFEXITED(status), "the child ended with status {status:#x}: it hung, or was killed");
    Ok(libc::WEXITSTATUS(status))
}

fn fork(way: Way) -> Result<()> {
    let cuda = Cuda::open("libcuda.so.1")?;
    let at = cuda.alloc(3 << 20)?;
    let library = library()?;
    let mut found = Vec::new();
    for name in FUNCTIONS {
        found.push((name, "dlsym", symbol(library, name)?));
        let plain = name.trim_end_matches("_v2");
        if let Ok(looked) = cuda.lookup(plain, 12_000, 0) {
            found.push((name, "cuGetProcAddress", looked as *mut c_void));
        }
    }
    let (mut reader, writer) = std::io::pipe()?;
    let status = in_child(way, || {
        let said = found.iter().map(|&(name, how, function)| (name, how, call(function)));
        let mut text = String::new();
        // Reuse the library's former descriptor numbers for the child's own sockets.
        let sockets: Vec<_> = (0..64).filter_map(|_| UnixStream::pair().ok()).collect();
        for (name, how, code) in said.filter(|said| said.2 != 3) {
            let _ = writeln!(text, "{name} by {how}: {code}");
        }
        for (one, other) in &sockets {
            for end in [one, other] {
                let _ = end.set_nonblocking(true);
                if let Ok(bytes) = {
                    let mut end = end;
                    end.read(&mut [0; 4096])
                } {
                    let _ = writeln!(text, "{bytes} bytes in a socket of the child");
                }
            }
        }
        let _ = std::io::Write::write_all(&mut &writer, text.as_bytes());
        i32::from(!text.is_empty())
    })?;
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text)?;
    ensure!(status == 0 && text.is_empty(), "in the child: {text}");
    // The parent can still use the card.
    cuda.set(at, 3, 1 << 20)?;
    println!("{} functions, {:x}", found.len(), cuda.read(at, 1)?[0]);
    Ok(())
}

fn fork_before() -> Result<()> {
    let library = library()?;
    let version = symbol(library, "cuDriverGetVersion")?;
    ensure!(call(version) == 1, "a null pointer is refused, by the driver");
    // Simulate a server that has loaded the library, and whose workers start further workers.
    let work = || {
        let works = || -> Result<()> {
            let cuda = Cuda::open("libcuda.so.1")?;
            let at = cuda.alloc(3 << 20)?;
            cuda.set(at, 5, 1 << 20)?;
            ensure!(cuda.read(at, 1)?[0] == 0x0505_0505_0505_0505, "other contents");
            Ok(())
        };
        match works() {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("in the child: {error:#}");
                1
            }
        }
    };
    let status = in_child(Way::Fork, || in_child(Way::Fork, work).unwrap_or(2))?;
    ensure!(status == 0, "the grandchild ended with {status}");
    let status = in_child(Way::Fork, work)?;
    ensure!(status == 0, "the child ended with {status}");
    println!("children work");
    Ok(())
}

/// Returns the names of this process's threads, each with its signal mask.
fn threads() -> Result<Vec<(String, u64)>> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir("/proc/self/task")? {
        let status = std::fs::read_to_string(entry?.path().join("status"))?;
        let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
        let blocked = u64::from_str_radix(field("SigBlk:").context("the thread's signal mask is unreadable")?, 16)?;
        threads.push((field("Name:").unwrap_or_default().to_owned(), blocked));
    }
    Ok(threads)
}

fn signals() -> Result<()> {
    let cuda = Cuda::open("libcuda.so.1")?;
    let at = cuda.alloc(3 << 20)?;
    // SAFETY: all structures are local variables, and the program has no other thread yet.
    let mut taken = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        let descriptor = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC);
        ensure!(descriptor >= 0, "no descriptor for signals");
        std::fs::File::from(OwnedFd::from_raw_fd(descriptor))
    };
    for _ in 0..3 {
        // SAFETY: the signal goes to this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
        let mut information = [0; size_of::<libc::signalfd_siginfo>()];
        taken.read_exact(&mut information)?;
        cuda.set(at, 9, 1 << 20)?;
    }
    // Ignore signals that cannot be blocked, the two that the C library reserves, and SIGSYS, which a sandbox around
    // the program may use to emulate system calls.
    let own = 1u64 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1) | 1 << (libc::SIGSYS - 1) | 1 << 31 | 1 << 32;
    let main = std::fs::read_to_string("/proc/self/comm")?;
    let open: Vec<_> =
        threads()?.into_iter().filter(|(name, blocked)| name != main.trim() && blocked | own != !0).collect();
    ensure!(open.is_empty(), "threads that do not block the program's signals: {open:x?}");
    println!("signals are the program's");
    Ok(())
}

fn limit() -> Result<(u64, u64)> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer refers to a local variable.
    ensure!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0, "no limit");
    Ok((limit.rlim_cur, limit.rlim_max))
}

/// Returns the open descriptors of this process.
fn open_descriptors() -> Result<Vec<i32>> {
    let numbers = std::fs::read_dir("/proc/self/fd")?.map(|entry| Ok(entry?.file_name().to_string_lossy().parse()?));
    numbers.collect()
}

/// Returns the limit on open files in a child program, and the number of the child's open descriptors.
fn child() -> Result<Vec<String>> {
    let script = "ulimit -n; ls /proc/self/fd | wc -l";
    let child = Command::new("/bin/sh").args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&child.stdout).split_whitespace().map(str::to_owned).collect())
}

fn children(mib: u64) -> Result<()> {
    let soft = 256;
    let limits = libc::rlimit { rlim_cur: soft, rlim_max: limit()?.1 };
    // SAFETY: the pointer refers to a local variable.
    ensure!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits) } == 0, "cannot set the limit");
    let before: Vec<i32> = open_descriptors()?;
    let expected = child()?;
    ensure!(expected.first().is_some_and(|said| *said == soft.to_string()), "a child says {expected:?}");
    let cuda = Cuda::open("libcuda.so.1")?;
    let at = cuda.alloc(mib << 20)?;
    cuda.set(at, 1, mib << 20)?;
    ensure!(limit()? == (soft, limits.rlim_max), "the limit is now {:?}", limit()?);
    let said = child()?;
    ensure!(said == expected, "a child of the program says {said:?} instead of {expected:?}");
    // After a `fork` without `exec`, no descriptor in the child keeps card memory or the connection alive.
    let (mut reader, writer) = std::io::pipe()?;
    let status = in_child(Way::Fork, || {
        let sockets = open_descriptors().unwrap_or_default();
        let library = sockets.iter().filter(|number| **number >= 1024).count();
        let _ =
            std::io::Write::write_all(&mut &writer, format!("{library} {}", limit().unwrap_or_default().0).as_bytes());
        0
    })?;
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text)?;
    ensure!(status == 0 && text == format!("0 {soft}"), "a forked child has {text}");
    // Programs that use `select` need descriptor numbers below 1024.
    let low: Vec<_> =
        open_descriptors()?.into_iter().filter(|number| *number < 1024 && !before.contains(number)).collect();
    let names = low.iter().map(|number| std::fs::read_link(format!("/proc/self/fd/{number}")));
    let sockets: Vec<_> =
        names.filter_map(Result::ok).filter(|name| name.to_string_lossy().starts_with("socket")).collect();
    ensure!(sockets.is_empty(), "the library uses the low numbers {sockets:?}");
    println!("the limit is not the program's: {}", cuda.read(at, 1)?[0]);
    Ok(())
}

fn closed(file: &str) -> Result<()> {
    let mut output = std::fs::File::create(file)?;
    for number in 0..3 {
        // SAFETY: the descriptors belong to the program, and are no longer used here.
        unsafe { libc::close(number) };
    }
    let cuda = Cuda::open("libcuda.so.1")?;
    let at = cuda.alloc(20 << 20)?;
    cuda.set(at, 1, 20 << 20)?;
    let of_library = |number: &i32| {
        let name = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
        name.to_string_lossy().starts_with("socket")
    };
    let taken: Vec<i32> = (0..3).filter(of_library).collect();
    let said = format!("{taken:?} of {:?}", output.as_raw_fd() > 2);
    std::io::Write::write_all(&mut output, said.as_bytes())?;
    Ok(())
}

fn freed(mib: u64) -> Result<()> {
    let cuda = Cuda::open("libcuda.so.1")?;
    let (spin, stream) = (cuda.kernel("spin")?, cuda.stream()?);
    let word = cuda.alloc(8)?;
    cuda.set(word, 0, 8)?;
    let ended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ends = std::sync::Arc::clone(&ended);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ends.store(true, std::sync::atomic::Ordering::SeqCst);
    });
    let by_itself: Vec<u64> = (0..mib / 4).map(|_| cuda.alloc(2 << 20)).collect::<Result<_, _>>()?;
    let in_stream: Vec<u64> = (0..mib / 4).map(|_| cuda.alloc_async(2 << 20, stream)).collect::<Result<_, _>>()?;
    for at in by_itself.iter().chain(&in_stream) {
        cuda.set(*at, 7, 2 << 20)?;
    }
    by_itself.iter().try_for_each(|at| cuda.free(*at))?;
    cuda.launch(spin, &[1000, word], stream)?;
    in_stream.iter().try_for_each(|at| cuda.free_async(*at, stream))?;
    println!("free {}", cuda.info()?.0 >> 20);
    while !ended.load(std::sync::atomic::Ordering::SeqCst) {
        cuda.launch(spin, &[1000, word], stream)?;
    }
    println!("worked");
    Ok(())
}

fn forgets() -> Result<()> {
    let cuda = Cuda::open("libcuda.so.1")?;
    let at = cuda.alloc(3 << 20)?;
    cuda.set(at, 1, 3 << 20)?;
    std::env::set_current_dir("/")?;
    // SAFETY: no other thread of the program reads the environment, and the library's thread must not read it.
    ensure!(unsafe { libc::clearenv() } == 0, "cannot clear the environment");
    println!("forgot");
    std::io::stdin().read_line(&mut String::new())?;
    let more = cuda.alloc(3 << 20)?;
    cuda.set(more, 2, 3 << 20)?;
    println!("{:x} {:x}", cuda.read(at, 1)?[0], cuda.read(more, 1)?[0]);
    Ok(())
}

fn unload() -> Result<()> {
    let library = library()?;
    // SAFETY: no other code has initialized the driver, and each load has a matching close.
    unsafe {
        let init: unsafe extern "C" fn(u32) -> c_int = std::mem::transmute(symbol(library, "cuInit")?);
        ensure!(init(0) == 0, "cuInit");
        libc::dlclose(library);
    }
    // Meanwhile, the library's thread tries to connect to its owner.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let cuda = Cuda::open("libcuda.so.1")?;
    let at = cuda.alloc(3 << 20)?;
    cuda.set(at, 2, 1 << 20)?;
    println!("{:x}", cuda.read(at, 1)?[0]);
    Ok(())
}
