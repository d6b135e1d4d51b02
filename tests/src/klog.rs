//! Parses a guest's kernel log in the format of the agent's `dmesg`, in which each line has a level.

/// Numerically highest level that counts as a complaint. Levels 0 to 4 are emergency to warning.
const WARNING: u8 = 4;

/// Prefixes of kernel messages that are caused by a busy host instead of a driver.
const OF_THE_HOST: [&str; 2] = ["clocksource: ", "hrtimer: interrupt took"];

/// A line of a kernel log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Level from 0 (emergency) to 7 (debug), as in `syslog(2)`.
    pub level: u8,
    /// Text after the timestamp.
    pub text: String,
}

impl Line {
    /// Returns true for warnings and worse, except those caused by a busy host.
    pub fn complains(&self) -> bool {
        self.level <= WARNING && !OF_THE_HOST.iter().any(|begin| self.text.starts_with(begin))
    }
}

/// Parses lines of the form `<level>[time] text`. A line without a level continues the previous line.
pub fn parse(lines: &[String]) -> Vec<Line> {
    let mut parsed: Vec<Line> = Vec::new();
    for line in lines {
        let Some((level, rest)) = line.strip_prefix('<').and_then(|l| l.split_once('>')) else {
            if let Some(last) = parsed.last_mut() {
                last.text.push('\n');
                last.text.push_str(line);
            }
            continue;
        };
        // The higher bits contain the facility.
        let level = level.parse::<u32>().map_or(7, |l| (l & 7) as u8);
        let text = rest.strip_prefix('[').and_then(|r| r.split_once("] ")).map_or(rest, |(_, text)| text);
        parsed.push(Line { level, text: text.to_owned() });
    }
    parsed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_level_and_text() {
        let lines =
            ["<6>[    0.000000] Linux version 6.1", "<12>[    1.5] nouveau 0000:01:00.0: fifo: [x] bad", "more"];
        let parsed = parse(&lines.map(str::to_owned));
        assert_eq!(parsed.len(), 2);
        assert_eq!(parsed[0], Line { level: 6, text: "Linux version 6.1".into() });
        assert!(!parsed[0].complains() && parsed[1].complains());
        assert_eq!(parsed[1].text, "nouveau 0000:01:00.0: fifo: [x] bad\nmore");
        let busy = parse(&["<4>[ 60.1] clocksource: Long readout interval, skipping watchdog check".to_owned()]);
        assert!(!busy[0].complains());
    }
}
