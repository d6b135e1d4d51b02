//! Commands that the host can send. `help` lists them.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::system::{RebootCommand, reboot};

use crate::request::{Answers, Request};
use crate::{kmsg, modules, pci, reaper};

/// Maximum length of a line of program output, in bytes. Longer lines are split.
const LONGEST_OUTPUT_LINE: u64 = 16 * 1024;

const HELP: &str = "\
load [name=value ...]   load the modules in /etc/modules.list; the parameters are nouveau's
unload                  remove nouveau
unbind | bind           unbind the cards from nouveau | bind them to it
rescan                  detect new PCI functions
dmesg                   kernel log, as <level>[time] text
interrupts, meminfo     the files in /proc
modules                 /proc/modules
lspci                   PCI functions, and the cards' regions
nodes                   names in /dev/dri
cat PATH | ls PATH | write PATH TEXT
sleep SECONDS
run PROGRAM [ARG ...]   run a program; exit code 128 + N for signal N
sh COMMAND              run a shell command, if the guest has a shell
kill ID [SIGNAL]        signal command ID's program (default: 9)
uname                   kernel release and version
poweroff | reboot";

/// Process IDs of running programs, keyed by command ID.
static RUNNING: Mutex<Option<HashMap<String, u32>>> = Mutex::new(None);

/// Executes a command, and returns its exit code. On an error, the caller sends exit code 1, or 127 if the command is
/// unknown or malformed.
pub fn execute(request: &Request, answers: &Answers) -> io::Result<i32> {
    let (name, rest) = match request.words.split_once(char::is_whitespace) {
        Some((name, rest)) => (name, rest.trim()),
        None => (request.words.as_str(), ""),
    };
    match name {
        "help" => answers.output(HELP),
        "load" => modules::load_all(rest)?.iter().for_each(|line| answers.output(line)),
        "unload" => modules::unload(modules::DRIVER)?,
        "unbind" => pci::unbind()?,
        "bind" => pci::bind()?,
        "rescan" => pci::rescan()?,
        "dmesg" => kmsg::read_all()?.iter().for_each(|line| answers.output(line)),
        "interrupts" => show("/proc/interrupts", answers)?,
        "meminfo" => show("/proc/meminfo", answers)?,
        "modules" => show("/proc/modules", answers)?,
        "lspci" => pci::list()?.iter().for_each(|line| answers.output(line)),
        "nodes" => names("/dev/dri", answers)?,
        "uname" => uname(answers),
        "cat" => show(rest, answers)?,
        "ls" => names(rest, answers)?,
        "write" => write(rest)?,
        "sleep" => sleep(rest)?,
        "run" => return run(&request.id, rest, answers),
        "sh" => return start(&request.id, Command::new("/bin/sh").args(["-c", rest]), answers),
        "kill" => kill(rest)?,
        "poweroff" => leave(RebootCommand::PowerOff, answers)?,
        "reboot" => leave(RebootCommand::Restart, answers)?,
        _ => return Err(malformed(&format!("{name}: no such command; try help"))),
    }
    Ok(0)
}

fn malformed(text: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, text.to_owned())
}

fn named(what: &str, error: &io::Error) -> io::Error {
    io::Error::other(format!("{what}: {error}"))
}

fn show(path: &str, answers: &Answers) -> io::Result<()> {
    let bytes = fs::read(path).map_err(|error| named(path, &error))?;
    String::from_utf8_lossy(&bytes).lines().for_each(|line| answers.output(line));
    Ok(())
}

fn names(directory: &str, answers: &Answers) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        // `/dev/dri` does not exist before a driver has been loaded.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(named(directory, &error)),
    };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names.iter().for_each(|name| answers.output(name));
    Ok(())
}

fn uname(answers: &Answers) {
    let uname = rustix::system::uname();
    answers.output(&format!("{} {}", uname.release().to_string_lossy(), uname.version().to_string_lossy()));
}

fn write(rest: &str) -> io::Result<()> {
    let (path, text) = rest.split_once(char::is_whitespace).ok_or_else(|| malformed("write PATH TEXT"))?;
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .and_then(|mut file| io::Write::write_all(&mut file, text.trim_start().as_bytes()))
        .map_err(|error| named(path, &error))
}

fn sleep(rest: &str) -> io::Result<()> {
    let seconds = rest.parse::<f64>().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    std::thread::sleep(seconds.ok_or_else(|| malformed("sleep SECONDS"))?);
    Ok(())
}

fn run(id: &str, rest: &str, answers: &Answers) -> io::Result<i32> {
    let mut words = rest.split_whitespace();
    let program = words.next().ok_or_else(|| malformed("run PROGRAM [ARG ...]"))?;
    start(id, Command::new(program).args(words), answers)
}

fn start(id: &str, command: &mut Command, answers: &Answers) -> io::Result<i32> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("RUST_BACKTRACE", "1");
    let (mut child, code) = reaper::spawn(command).map_err(|error| named(&program, &error))?;
    with_running(|running| running.insert(id.to_owned(), child.id()));
    let streams: [Option<Box<dyn Read + Send>>; 2] = [
        child.stdout.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>),
        child.stderr.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>),
    ];
    std::thread::scope(|scope| {
        for stream in streams.into_iter().flatten() {
            scope.spawn(|| stream_lines(stream, answers));
        }
    });
    let code = code.recv().map_err(|_| io::Error::other("the exit code was lost"))?;
    with_running(|running| running.remove(id));
    Ok(code)
}

fn stream_lines(stream: Box<dyn Read + Send>, answers: &Answers) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        match stream.by_ref().take(LONGEST_OUTPUT_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => answers.output(String::from_utf8_lossy(&line).trim_end_matches('\n')),
        }
    }
}

fn with_running<T>(act: impl FnOnce(&mut HashMap<String, u32>) -> T) -> T {
    act(RUNNING.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

fn kill(rest: &str) -> io::Result<()> {
    let mut words = rest.split_whitespace();
    let id = words.next().ok_or_else(|| malformed("kill ID [SIGNAL]"))?;
    let signal = match words.next().unwrap_or("9") {
        "9" | "KILL" => Signal::KILL,
        "15" | "TERM" => Signal::TERM,
        "19" | "STOP" => Signal::STOP,
        "18" | "CONT" => Signal::CONT,
        other => return Err(malformed(&format!("signal {other}: one of 9, 15, 18, 19"))),
    };
    let pid = with_running(|running| running.get(id).copied());
    let pid = pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let pid = pid.ok_or_else(|| io::Error::other(format!("command {id} runs no program")))?;
    Ok(kill_process(pid, signal)?)
}

/// Shuts down or reboots the guest. Replies first, because no output is possible afterwards.
fn leave(how: RebootCommand, answers: &Answers) -> io::Result<()> {
    rustix::fs::sync();
    answers.end(0);
    answers.drain();
    reboot(how)?;
    Err(io::Error::other("the kernel went on"))
}
