# A policy that is a text: trained with the model of the package, looked at, and compared.
torchrl-llm train langmarl config=calculator > first.txt 2>&1
cat first.txt
if grep -q $'\x1b' first.txt; then exit 1; fi
torchrl-llm train langmarl config=calculator seed=1 folder=other > /dev/null
torchrl-llm view outputs/langmarl/*/* > said.txt
torchrl-llm view outputs/langmarl/*/* other >> said.txt
cat said.txt
grep -q 'episodes, ' said.txt
grep -q '^page view.html, two runs, ' said.txt
