//! The files that a worker may open.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible as _, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreatedAttr as _, RulesetError, RulesetStatus, Scope,
};

use super::Options;

/// Files and folders that workers may read: libraries, and files that describe the machine, the driver and the process.
/// The rules also prevent workers from reading other processes' memory below /proc.
const READABLE: [&str; 16] = [
    "/usr",
    "/lib",
    "/lib64",
    "/nix/store",
    "/run/opengl-driver",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/nvidia",
    "/etc/nsswitch.conf",
    "/proc",
    "/sys",
    "/dev/urandom",
    "/dev/random",
];
/// Device files that workers may read and write, in addition to NVIDIA's.
const DEVICES: [&str; 2] = ["/dev/null", "/dev/zero"];
/// Folder of the process's threads. The driver sets thread names through its files.
const THREADS: &str = "/proc/self/task";
/// Prefix of the names of NVIDIA's device files.
const NVIDIA: &str = "nvidia";
/// Maximum number of NVIDIA's device files.
const MAX_DEVICES: usize = 256;

/// Open files and folders that the rules apply to. The kernel binds a rule to the file's cached inode, and does not
/// replace the inode of a file below /proc while the file is open.
#[derive(Debug)]
pub(super) struct Files(#[expect(dead_code, reason = "held open")] Vec<PathFd>);

/// Restricts this thread and the threads that it starts. Returns `None` if the kernel lacks Landlock.
pub(super) fn restrict(options: &Options) -> Result<Option<Files>, RulesetError> {
    let newest = ABI::V6;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let change = read | AccessFs::from_write(newest);
    let rules = READABLE.iter().map(|path| (PathBuf::from(path), read));
    let rules = rules.chain(options.readable.iter().map(|path| (path.clone(), read)));
    let threads = read | AccessFs::WriteFile | AccessFs::Truncate;
    let rules = rules.chain([(THREADS.into(), threads)]);
    let rules = rules.chain(devices().into_iter().map(|path| (path, change)));
    let rules = rules.chain(options.writable.iter().map(|path| (path.clone(), change)));

    // Older kernels support fewer access rights, and no scopes.
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    let ruleset = ruleset.handle_access(AccessFs::from_all(newest))?.scope(Scope::from_all(newest))?;
    let mut ruleset = ruleset.create()?;
    let mut open = Vec::new();
    for (path, access) in rules {
        // A missing file does not need a rule.
        let Ok(file) = PathFd::new(&path) else { continue };
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(newest) };
        ruleset = add(ruleset, &file, access)?;
        open.push(file);
    }
    let status = ruleset.restrict_self()?.ruleset;
    Ok((status != RulesetStatus::NotEnforced).then_some(Files(open)))
}

fn add(
    ruleset: landlock::RulesetCreated,
    file: &PathFd,
    access: BitFlags<AccessFs>,
) -> Result<landlock::RulesetCreated, RulesetError> {
    ruleset.add_rule(PathBeneath::new(file, access))
}

/// Returns the paths of NVIDIA's device files and of the other devices.
fn devices() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let nvidia = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(NVIDIA));
    let nvidia = nvidia.take(MAX_DEVICES).map(|entry| entry.path());
    nvidia.chain(DEVICES.iter().map(|path| Path::new(path).to_owned())).collect()
}
