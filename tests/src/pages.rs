//! Code blocks in the operators' pages. Tests run these blocks.

/// Returns a page's code blocks in one language, without list indentation.
pub fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for line in page.lines() {
        match &mut open {
            Some(_) if line.trim() == "```" => blocks.extend(open.take().map(|(_, text)| text)),
            Some((depth, text)) => {
                text.push_str(line.get(*depth..).unwrap_or_default());
                text.push('\n');
            }
            None if line.trim() == format!("```{language}") => {
                open = Some((line.len() - line.trim_start().len(), String::new()))
            }
            None => {}
        }
    }
    blocks
}
