//! Quantities in Kubernetes' notation: `8Gi`, `1500M`, `250`, `1e3`, `500m`.

/// Maximum length of a quantity's text, in bytes.
const MAX_TEXT: usize = 64;

/// Parses a quantity that must be a whole number.
///
/// # Errors
/// Returns an error if the text is not a quantity, or if the number is too large or not whole.
pub fn whole(text: &str) -> Result<u64, String> {
    let wrong = |what: &str| Err(format!("`{}` is {what}", text.chars().take(MAX_TEXT).collect::<String>()));
    if text.len() > MAX_TEXT {
        return wrong("not a quantity, expected one such as 8Gi");
    }
    let end = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (integer, fraction) = number.split_once('.').unwrap_or((number, ""));
    if integer.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return wrong("not a quantity, expected one such as 8Gi");
    }
    let Some((times, by)) = scale(suffix) else { return wrong("not a quantity, expected one such as 8Gi") };
    let digits = fraction.trim_end_matches('0');
    let parsed = || {
        let integer = if integer.is_empty() { 0 } else { integer.parse::<u128>().ok()? };
        let tenths = u32::try_from(digits.len()).ok().filter(|places| *places <= 18)?;
        let shift = 10_u128.pow(tenths);
        let fraction = if digits.is_empty() { 0 } else { digits.parse::<u128>().ok()? };
        let scaled = integer.checked_mul(shift)?.checked_add(fraction)?.checked_mul(times)?;
        Some((scaled, shift.checked_mul(by)?))
    };
    match parsed() {
        Some((scaled, by)) if !scaled.is_multiple_of(by) => wrong("not a whole number"),
        Some((scaled, by)) => u64::try_from(scaled / by).or_else(|_| wrong("too much")),
        None => wrong("too much"),
    }
}

/// Returns the multiplier and divisor of a suffix.
fn scale(suffix: &str) -> Option<(u128, u128)> {
    let binary = |power: u32| Some((1 << (10 * power), 1));
    let decimal = |power: u32| Some((10_u128.pow(power), 1));
    match suffix {
        "" => Some((1, 1)),
        "m" => Some((1, 1000)),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        exponent => {
            let digits = exponent.strip_prefix(['e', 'E'])?;
            decimal(digits.strip_prefix('+').unwrap_or(digits).parse().ok().filter(|power| *power <= 18)?)
        }
    }
}

/// Parses a quantity of bytes that must be a whole number of MiB.
///
/// # Errors
/// Returns an error if the text is not a quantity, or if the number of bytes is too large or not a multiple of 1 MiB.
pub fn mib(text: &str) -> Result<u64, String> {
    let bytes = whole(text)?;
    match bytes.is_multiple_of(1 << 20) {
        true => Ok(bytes >> 20),
        false => Err(format!("`{text}` is not a whole number of MiB")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, expected) in [
            ("0", 0),
            ("250", 250),
            ("8Gi", 8 << 30),
            ("1.5Gi", 3 << 29),
            ("1500M", 1_500_000_000),
            ("1e3", 1000),
            ("1E3", 1000),
            ("1E", 1_000_000_000_000_000_000),
            ("500000m", 500),
            (".5k", 500),
            ("16Ei", u64::MAX),
        ] {
            let found = whole(text);
            if expected == u64::MAX {
                assert_eq!(found, Err("`16Ei` is too much".to_owned()));
            } else {
                assert_eq!(found, Ok(expected), "{text}");
            }
        }
        for text in ["", "Gi", "-1", "+1", "1 Gi", "1gi", "1.2.3", "1e", "1e99", "1e-3", "0x10", "1Gii", "٣"] {
            assert!(whole(text).unwrap_err().contains("not a quantity"), "{text}");
        }
        assert!(whole("100m").unwrap_err().contains("not a whole number"));
        assert!(whole("1.0000000000000000001").unwrap_err().contains("too much"));
        assert_eq!(mib("1Gi"), Ok(1024));
        assert!(mib("1G").unwrap_err().contains("not a whole number of MiB"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            let _ = whole(&text);
        }

        #[test]
        fn written_quantity_reads_back_unchanged(mib in 0..1_u64 << 40) {
            prop_assert_eq!(super::mib(&format!("{mib}Mi")), Ok(mib));
            prop_assert_eq!(whole(&format!("{mib}")), Ok(mib));
        }
    }
}
