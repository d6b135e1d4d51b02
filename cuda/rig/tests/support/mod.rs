//! Creates a folder with a card, the library and the driver, and runs processes that use them.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub mod daemon;
pub mod guest;
pub mod hostile;
pub mod service;
pub mod virtio;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_cuda-program");

/// A folder with a fake card, and with the library and the driver under the names that programs load.
pub struct Rig {
    pub folder: tempfile::TempDir,
    /// Path of the fake driver. Its NVML is in the same folder.
    pub fake: PathBuf,
    /// Size of a context on the card, in MiB.
    pub context_mib: u64,
    /// Number of cards.
    pub cards: u64,
    /// NVLink connections between the cards, in the fake driver's format.
    pub nvlinks: &'static str,
    /// Set to record kernels in the card's folder.
    pub records: bool,
    mib: u64,
}

/// Returns the path of a file in Cargo's build folder.
pub fn built(name: &str) -> PathBuf {
    // The libraries and other crates' programs are in the parent of the test binary's folder.
    let own = std::env::current_exe().expect("this file");
    let folder = own.parent().and_then(Path::parent).expect("a folder in cargo's build folder");
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing: `cargo xtask test --suite cuda` builds it", path.display());
    path
}

/// Message that the library prints if it does not find a driver.
pub const NO_DRIVER: &str = "gpu-mediator: libcuda: no libcuda.so.1 of NVIDIA's driver was found; install the driver, or name its \
                             library in GPU_MEDIATOR_CUDA_DRIVER\n";

/// Returns true if the loader finds a driver on this host.
pub fn host_has_driver(rig: &Rig) -> bool {
    let mut command = rig.command(PROGRAM, "none");
    command.arg("look").output().expect("starts").status.success()
}

impl Rig {
    /// Creates a rig with one card of `mib` MiB.
    pub fn new(mib: u64) -> Self {
        let memory = Path::new("/dev/shm");
        let folder = if memory.exists() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let folder = folder.expect("a folder");
        let fake = built("libcuda_fake.so");
        for (name, library) in [("plain", fake.clone()), ("shim", built("libcuda.so"))] {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
            for file in ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"] {
                symlink(&library, folder.path().join(name).join(file)).expect("a link");
            }
        }
        std::fs::create_dir(folder.path().join("run")).expect("a folder");
        let fake = folder.path().join("plain/libcuda.so.1");
        Self { folder, fake, context_mib: 0, cards: 1, nvlinks: "", records: false, mib }
    }

    /// Returns a command with the card and the folder of one library in its environment.
    pub fn command(&self, file: impl AsRef<std::ffi::OsStr>, library: &str) -> Command {
        let mut command = Command::new(file);
        command
            .env("FAKE_CUDA_FOLDER", self.folder.path().join("card"))
            .env("FAKE_CUDA_MIB", self.mib.to_string())
            .env("FAKE_CUDA_CONTEXT_MIB", self.context_mib.to_string())
            .env("FAKE_CUDA_CARDS", self.cards.to_string())
            .env("FAKE_CUDA_NVLINKS", self.nvlinks)
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env("LD_LIBRARY_PATH", self.folder.path().join(library))
            .env(cuda_protocol::LOG_VARIABLE, "1")
            .env("RUST_BACKTRACE", "0")
            .env_remove(cuda_protocol::SOCKET_VARIABLE);
        command.env_remove("CUDA_MPS_PIPE_DIRECTORY");
        if self.records {
            command.env("FAKE_CUDA_RECORD", "1");
        }
        if library == "shim" {
            command.env(cuda_protocol::DRIVER_VARIABLE, &self.fake);
        }
        command
    }

    /// Allows other users' programs to connect to the socket.
    pub fn let_others_in(&self) {
        use std::os::unix::fs::PermissionsExt as _;
        for (path, mode) in [(self.folder.path().to_owned(), 0o711), (self.socket(), 0o666)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("permissions");
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("run/socket")
    }

    /// Starts the test program as a tenant.
    pub fn program(&self, tenant: &str, arguments: &[&str]) -> Program {
        let mut command = self.command(PROGRAM, "shim");
        command.env(cuda_protocol::SOCKET_VARIABLE, self.socket()).env(cuda_protocol::TENANT_VARIABLE, tenant);
        Program::start(command.args(arguments))
    }

    /// Returns a line with the card's free and total memory in MiB, as reported by a program without a tenant.
    pub fn free(&self) -> String {
        let output = self.command(PROGRAM, "plain").arg("look").output().expect("starts");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Resets a card. Its memory contents and all contexts on it are lost.
    pub fn reset(&self, card: u64) {
        let folder = self.card_folder(card);
        let last = std::fs::read_to_string(folder.join("number")).expect("the card was used");
        std::fs::write(folder.join("lost.new"), last).expect("written");
        std::fs::rename(folder.join("lost.new"), folder.join("lost")).expect("renamed");
    }

    /// Makes the exit handlers of programs named `name` wait for the card if it is reset.
    pub fn set_exit_waits(&self, card: u64, name: &str) {
        std::fs::write(self.card_folder(card).join("exit-waits"), name).expect("written");
    }

    /// Makes a card reject new contexts, or accept them again.
    pub fn set_broken(&self, card: u64, broken: bool) {
        let path = self.card_folder(card).join("broken");
        if broken { std::fs::write(path, "") } else { std::fs::remove_file(path) }.expect("the test's own executable");
    }

    /// Allows or prevents memory imports by processes that were restored on a card.
    pub fn set_importable(&self, card: u64, importable: bool) {
        let path = self.card_folder(card).join("unimportable");
        if importable { std::fs::remove_file(path) } else { std::fs::write(path, "") }.expect("the test's own file");
    }

    fn card_folder(&self, card: u64) -> PathBuf {
        let first = self.folder.path().join("card");
        if card == 0 { first } else { first.join(format!("card-{card}")) }
    }

    /// Waits until all of the card's memory is free.
    pub fn until_free(&self) {
        let all = format!("free={}", self.mib);
        // TIMEOUT: only a failing test waits this long.
        for _ in 0..600 {
            if self.free().starts_with(&all) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!("memory of the card is still in use: {}", self.free());
    }
}

/// A child process with its standard input and output.
pub struct Program {
    pub child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Program {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("starts");
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().expect("piped")));
        Self { child, input, output }
    }

    /// Returns the next line, or an empty string at the end of the output.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("readable");
        line.trim().to_owned()
    }

    /// Reads `count` progress lines. Returns the number of buffers in the last one.
    pub fn steps(&mut self, count: usize) -> u64 {
        let mut buffers = 0;
        for _ in 0..count {
            let line = self.line();
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(words.first(), Some(&"step"), "{line}");
            buffers = words[2].parse().expect("a number");
        }
        buffers
    }

    /// Makes the program allocate more memory, and waits until it has done so.
    pub fn grow(&mut self) {
        let before = self.steps(1);
        self.say("more");
        while self.steps(1) <= before {}
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.input.as_mut().expect("open"), "{line}").expect("written");
    }

    /// Sends a line to a program that repeats each line. Returns the lines that the program prints before that.
    pub fn print(&mut self, line: &str) -> Vec<String> {
        self.say(line);
        std::iter::repeat_with(|| self.line()).take_while(|printed| printed != line && !printed.is_empty()).collect()
    }

    /// Closes the program's standard input.
    pub fn close(&mut self) {
        self.input = None;
    }

    /// Closes the program's standard input, and checks that the program exits successfully. Returns its next line that
    /// is not a progress line.
    pub fn end(mut self) -> String {
        self.input = None;
        let last = loop {
            let line = self.line();
            if !line.starts_with("step") {
                break line;
            }
        };
        assert!(self.child.wait().expect("ends").success(), "the program failed after: {last}");
        last
    }

    /// Returns a reader for the rest of the program's output.
    pub fn output(&mut self) -> &mut impl std::io::Read {
        &mut self.output
    }

    pub fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("ends");
    }
}

/// Starts `cuda-owner serve` with tenants `a` and `b`, and waits until it is ready.
pub fn owner(rig: &Rig, card_mib: u64, arguments: &[&str]) -> Program {
    owner_by(rig, &[], card_mib, arguments)
}

/// Starts an owner like [`owner`], but through the program and arguments in `prefix`.
pub fn owner_by(rig: &Rig, prefix: &[&str], card_mib: u64, arguments: &[&str]) -> Program {
    let mut command = match prefix {
        [] => rig.command(built("cuda-owner"), "plain"),
        [program, rest @ ..] => {
            let mut command = rig.command(program, "plain");
            command.args(rest).arg(built("cuda-owner"));
            command
        }
    };
    let card = card_mib.to_string();
    command.arg("--driver").arg(&rig.fake).arg("serve").arg("--socket").arg(rig.socket());
    command.args(["--card-mib", &card, "--host-mib", "96", "--chunk-mib", "2"]);
    command.arg("--journal").arg(rig.folder.path().join("journal"));
    let mut owner = Program::start(command.args(["--tenant", "a:64", "--tenant", "b:64"]).args(arguments));
    let line = owner.line();
    assert!(line.contains("ready"), "{line}");
    owner
}

/// Stops an owner and returns its final output.
pub fn describe(owner: Program) -> serde_json::Value {
    serde_json::from_str(&owner.end()).expect("JSON")
}

/// Like [`describe`], but first waits until the owner has handled all exits of programs. To this end, runs a program of
/// tenant `b`, which no test suspends: the owner handles its requests after the exits.
pub fn settled(rig: &Rig, owner: Program) -> serde_json::Value {
    rig.program("b", &["look"]).end();
    describe(owner)
}

/// Returns the number of a tenant's chunks, on the card and in host memory together.
pub fn chunks(view: &serde_json::Value, tenant: usize) -> u64 {
    let number = |key: &str| view["tenants"][tenant][key].as_u64().expect("a number");
    number("chunks_on_card") + number("chunks_in_host")
}
